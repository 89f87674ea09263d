"""Dense modules made parallel: layers with two names, ties, subclasses, layers in layers; right or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradmesh as gm

Threads = Callable[[int], Callable[..., list[Any]]]


def _filled(module: nn.Module, seed: int = 0) -> Any:
    """The module with the same values on every rank, whatever the default generator does."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return module.double()


class Twice(nn.Module):
    """One norm and one pair of layers, called under two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(3), nn.Linear(3, 5), nn.Linear(5, 3)
        self.again, self.up2, self.down2 = self.norm, self.up, self.down

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        y: Tensor = x + self.down2(torch.tanh(self.up2(self.again(x))))
        return y


@pytest.mark.parametrize("first", [True, False])
def test_a_layer_with_two_names_is_one_layer_still(threads: Threads, first: bool) -> None:
    styles: dict[str, Any] = {"norm": "replicated", "up": "column", "down": "row"}
    if not first:
        styles = {"again": "replicated", "up2": "column", "down2": "row"}
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dense = _filled(Twice())
    dense(x).pow(3).sum().backward()

    def found() -> tuple[bool, list[str], dict[str, Tensor]]:
        net: Any = gm.nn.tensor_parallel(_filled(Twice()), styles, sequence_dim=0)
        net(gm.shard(x)).pow(3).sum().backward()
        one = net.norm is net.again and net.up is net.up2 and net.down is net.down2
        names = list(gm.nn.dense_state_dict(net))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(parameter.grad)
        return one, names, gm.nn.dense_state_dict(net)

    for one, names, slopes in threads(2)(found):
        assert one
        assert names == list(dense.state_dict())
        for name, parameter in dense.named_parameters():
            torch.testing.assert_close(slopes[name], parameter.grad)


def test_an_encoder_layer_of_torch_is_right_in_evaluation_too(threads: Threads) -> None:
    dense = _filled(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)).eval()
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = dense(x).detach()

    def found() -> Tensor:
        net = gm.nn.tensor_parallel(copy.deepcopy(dense), {"linear1": "column", "linear2": "row"})
        with torch.no_grad():  # where torch's layer takes a way that reads the weights itself
            y: Tensor = copy.deepcopy(net)(x)
        return y

    for y in threads(2)(found):
        torch.testing.assert_close(y, expected)


class Scaled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Named(nn.Linear):
    """A linear layer that differs by its class alone."""


def _tied() -> nn.Module:
    net = nn.ModuleDict({"table": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    net["head"].weight = net["table"].weight
    return net


def _two_names() -> nn.Module:
    net = nn.ModuleDict({"a": nn.Linear(2, 2)})
    net["b"] = net["a"]
    return net


WRONG: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "a subclass with its own forward": (
        lambda: nn.Sequential(Scaled(2, 4)),
        {"0": "column"},
        "overrides forward",
    ),
    "a weight made of others": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 4))),
        {"0": "column"},
        "computed from other parameters",
    ),
    "sizes of a pattern without a layer": (
        lambda: nn.Sequential(nn.Linear(2, 4)),
        {"0": "column", "sizes": {"1": (2, 2)}},
        "sizes has patterns that are not in styles",
    ),
    "sizes with a wrong sum": (
        lambda: nn.Sequential(nn.Linear(2, 4)),
        {"0": "column", "sizes": {"0": (2, 1)}},
        "sizes does not match the layer",
    ),
    "a part of torch's attention": (
        lambda: nn.MultiheadAttention(4, 2),
        {"out_proj": "row"},
        "without calling it",
    ),
    "a layer within a replicated one": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(2, 4))),
        {"0": "replicated", "0.0": "column"},
        "inside a module that is replicated over the same ranks",
    ),
    "a replicated module around a parallel one": (
        lambda: nn.Sequential(nn.Sequential(gm.nn.ColumnParallelLinear(2, 4))),
        {"0": "replicated"},
        "already sharded or replicated over this axis",
    ),
    "a table whose tied head stays whole": (
        _tied,
        {"table": "vocab"},
        "is tied to a parameter that would be sharded",
    ),
    "two styles for one layer": (_two_names, {"a": "column", "b": "row"}, "two names"),
    "a second pattern that fits nothing": (
        lambda: nn.Sequential(nn.Linear(2, 4)),
        {"0": "column", "1": "row"},
        "a pattern matches no module",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_unsupported_module_raises_and_is_unchanged(threads: Threads, what: str) -> None:
    make, styles, words = WRONG[what]
    sizes, styles = styles.get("sizes"), {name: style for name, style in styles.items() if name != "sizes"}

    def refused() -> tuple[str, bool]:
        net = make()
        before = str(net)
        with pytest.raises(gm.GradmeshError) as error:
            gm.nn.tensor_parallel(net, styles, sizes=sizes)
        return str(error.value), str(net) == before

    for text, same in threads(2)(refused):
        assert words in text
        assert same


def test_a_subclass_without_a_forward_and_the_mode_of_a_layer_are_kept(threads: Threads) -> None:
    def found() -> tuple[str, bool]:
        net: Any = gm.nn.tensor_parallel(_filled(nn.Sequential(Named(2, 4))).eval(), {"0": "column"})
        return type(net[0]).__name__, net[0].training

    assert threads(2)(found) == [("ColumnParallelLinear", False)] * 2


def test_gradients_of_a_replicated_module_are_summed_once(threads: Threads) -> None:
    """Twice over one axis would be too large by the number of ranks; over two axes is as it has to be."""

    def found() -> tuple[str, list[str], float]:
        gm.mesh(a=2, b=2)
        scale = nn.Linear(1, 1, bias=False)
        twice = gm.nn.Replicated(gm.nn.Replicated(scale, "a"), "b")
        with pytest.raises(gm.GradmeshError) as error:
            gm.nn.Replicated(nn.Sequential(twice), "a")
        twice(torch.ones(1, 1)).sum().backward()
        assert scale.weight.grad is not None
        return str(error.value), list(gm.nn.dense_state_dict(twice)), scale.weight.grad.item()

    for text, names, slope in threads(4)(found):
        assert "already sharded or replicated over this axis" in text
        assert (names, slope) == (["weight"], 4.0)


@pytest.mark.parametrize("kind", ["column", "row", "vocab"])
def test_a_layer_on_an_axis_of_another_size_is_refused(threads: Threads, kind: str) -> None:
    def refused() -> list[str]:
        gm.mesh(dp=2, tp=2)
        layer, x = {
            "column": lambda: (gm.nn.ColumnParallelLinear(3, 4, axis="tp"), torch.ones(1, 3)),
            "row": lambda: (gm.nn.RowParallelLinear(4, 3, axis="tp"), torch.ones(1, 2)),
            "vocab": lambda: (gm.nn.VocabParallelEmbedding(4, 3, axis="tp"), torch.tensor([0])),
        }[kind]()
        texts = []
        with gm.use_mesh(gm.mesh(tp=4)):
            for wrong in (
                lambda: layer(x),
                lambda: gm.nn.dense_state_dict(layer),
                lambda: gm.nn.load_dense_state_dict(layer, {"weight": torch.ones(4, 4)}, strict=False),
            ):
                with pytest.raises(gm.GradmeshError) as error:
                    wrong()
                texts.append(str(error.value))
        return texts

    for texts in threads(4)(refused):
        assert all("another number of ranks" in text for text in texts)


def test_under_autocast_a_row_layer_has_the_dtype_of_the_dense_one(threads: Threads) -> None:
    def found() -> list[torch.dtype]:
        with torch.autocast("cpu", torch.bfloat16):
            whole = gm.nn.RowParallelLinear(4, 3)(torch.ones(2, 2))
            rows = gm.nn.RowParallelLinear(4, 3, sequence_dim=0)(torch.ones(2, 2))
            return [whole.dtype, rows.dtype, nn.Linear(4, 3)(torch.ones(2, 4)).dtype]

    assert threads(2)(found) == [[torch.bfloat16] * 3] * 2


@pytest.mark.parametrize("bias", [True, False])
def test_modules_that_differ_from_rank_to_rank_are_refused_on_every_rank_and_left_as_they_were(
    threads: Threads, bias: bool
) -> None:
    def found(check: Any) -> tuple[str, bool]:
        net: Any = _filled(nn.Sequential(nn.Linear(2, 4, bias=bias), nn.LayerNorm(4)))
        with torch.no_grad():
            net[1].weight += gm.rank() == 2  # not even a layer that is converted
        with gm.check(check):
            try:
                gm.nn.tensor_parallel(net, {"0": "column"})
            except gm.MismatchError as error:
                return str(error), type(net[0]) is nn.Linear
        return "", type(net[0]) is nn.Linear

    for text, kept in threads(3)(found, 1):
        assert kept
        assert "1.weight differ between rank 2 and rank 0" in text
        assert "0.weight" not in text
    assert threads(3)(found, 0) == [("", False)] * 3


def test_arguments_that_differ_from_rank_to_rank_are_refused(threads: Threads) -> None:
    def found(which: str) -> str:
        net, other = _filled(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))), gm.rank() == 1
        styles: dict[str, Any] = {"0": "column", **({"1": "row"} if which != "styles" or other else {})}
        with pytest.raises(gm.MismatchError) as caught:
            gm.nn.tensor_parallel(
                net,
                styles,
                sequence_dim=int(other) if which == "sequence_dim" else None,
                sizes={"0": (3, 1) if other else (1, 3)} if which == "sizes" else None,
            )
        return str(caught.value)

    for which in ("styles", "sequence_dim", "sizes"):
        for text in threads(2)(found, which):
            assert which in text or "'1': 'row'" in text


def test_a_second_conversion_over_the_same_or_another_axis_is_compared_without_the_shards(
    threads: Threads,
) -> None:
    def found() -> bool:
        gm.mesh(dp=2, tp=2)
        net = _filled(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))))
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        expected = net(x)
        gm.nn.tensor_parallel(net, {"0": "column", "1": "row"}, "tp")
        gm.nn.tensor_parallel(net, {"2": "column, gathered"}, "tp")
        gm.nn.tensor_parallel(net, {"3": "column, gathered"}, "dp")
        return torch.allclose(net(x), expected)

    assert all(threads(4)(found))


@pytest.mark.parametrize(
    "styles", [{"linear1": "column", "linear2": "row"}, {"norm?": "replicated"}, {"": ""}]
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("grad", [True, False])
def test_an_encoder_of_torch_takes_a_padding_mask_in_evaluation(
    threads: Threads, grad: bool, styles: dict[str, Any]
) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    dense = _filled(nn.TransformerEncoder(layer, 2)).eval()
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pad = torch.zeros(2, 5, dtype=torch.bool)
    pad[1, 3:] = True
    chosen: Any = {f"layers.*.{name}": style for name, style in styles.items() if name}

    def found() -> Tensor:
        net = copy.deepcopy(gm.nn.tensor_parallel(copy.deepcopy(dense), chosen or {"layers.?": "replicated"}))
        with torch.set_grad_enabled(grad):
            y: Tensor = net(x, src_key_padding_mask=pad)
        return y.detach()

    with torch.set_grad_enabled(grad):
        expected = dense(x, src_key_padding_mask=pad).detach()
    for y in threads(2)(found):
        torch.testing.assert_close(y[~pad], expected[~pad])


class Conv1D(nn.Module):
    """A linear layer with a weight of shape (in, out), as that of transformers."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.empty(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


@pytest.mark.parametrize("sizes", [None, {"0": (1, 0, 4), "2": (1, 0, 4)}])
@pytest.mark.parametrize("kind", [Conv1D, lambda nf, nx: nn.Linear(nx, nf)])
@pytest.mark.parametrize("first", ["column", "column, gathered"])
def test_layers_with_a_transposed_weight_and_given_sizes_are_those_of_the_dense_model(
    threads: Threads, kind: Callable[[int, int], nn.Module], sizes: Any, first: Any
) -> None:
    dense = _filled(nn.Sequential(kind(5, 3), nn.Tanh(), kind(3, 5)))
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dense(x).pow(3).sum().backward()

    def found() -> tuple[Any, Tensor, dict[str, Tensor], dict[str, Tensor]]:
        net: Any = copy.deepcopy(dense)
        net.zero_grad()
        gm.nn.tensor_parallel(net, {"0": first, "2": "row"}, sizes=sizes)
        net[2].split_input = first != "column"
        y = net(x)
        y.pow(3).sum().backward()
        state = {name: value.clone() for name, value in gm.nn.dense_state_dict(net).items()}
        gm.nn.load_dense_state_dict(net, state)
        cut = net[0].cuts["bias"].sizes
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(parameter.grad)
        return cut, y.detach(), state, gm.nn.dense_state_dict(net)

    for cut, y, state, slopes in threads(3)(found):
        assert cut == (sizes["0"] if sizes else (2, 2, 1))
        torch.testing.assert_close(y, dense(x).detach())
        for name, parameter in dense.named_parameters():
            assert torch.equal(state[name], parameter)
            torch.testing.assert_close(slopes[name], parameter.grad)


class Adapted(nn.Module):
    """A layer with low-rank weights of its own beside the one that it wraps, as peft makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer, self.down, self.up = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x) + self.up(self.down(x))
        return y


@pytest.mark.parametrize("pattern", ["blocks.0.q", "blocks.0.q.base_layer", "blocks.0.q.up"])
def test_a_layer_in_an_adapter_is_refused_by_its_name(threads: Threads, pattern: str) -> None:
    def found() -> str:
        net = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"q": Adapted()})])})
        with pytest.raises(gm.ArgumentError) as caught:
            gm.nn.tensor_parallel(net, {pattern: "column"})
        return str(caught.value)

    for text in threads(2)(found):
        assert f"'{pattern}'" in text
        assert "adapter" in text
        assert "use plain LoRA on a linear layer" in text


def _lora_layer(base: nn.Module, wide: int, out: int) -> nn.Module:
    """A layer with LoRA, as peft makes it: a class of the name Linear."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = base.requires_grad_(False)
            self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
            self.lora_A = nn.ModuleDict({"default": nn.Linear(wide, 2, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2, out, bias=False)})
            self.lora_magnitude_vector = nn.ModuleDict()

        def forward(self, x: Tensor) -> Tensor:
            low = self.lora_A["default"](self.lora_dropout["default"](x))
            y: Tensor = self.base_layer(x) + 0.5 * self.lora_B["default"](low)
            return y

    return Linear()


@pytest.mark.parametrize("kind", [Conv1D, lambda nf, nx: nn.Linear(nx, nf)])
@pytest.mark.parametrize("first", ["column", "column, gathered"])
@pytest.mark.parametrize("rows", [None, "balanced"])
def test_lora_is_sharded_with_its_layer_and_is_that_of_the_dense_model(
    threads: Threads, kind: Callable[[int, int], nn.Module], first: Any, rows: Any
) -> None:
    if rows and first != "column":
        pytest.skip("a gathered layer takes all rows")
    layers = [_lora_layer(kind(5, 3), 3, 5), nn.Tanh(), _lora_layer(kind(3, 5), 5, 3)]
    dense = _filled(nn.Sequential(*layers))
    x = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dense(x).pow(3).sum().backward()
    trained = {name: each.grad for name, each in dense.named_parameters() if each.requires_grad}
    assert len(trained) == 4

    def found() -> tuple[Tensor, dict[str, Tensor], list[bool]]:
        net: Any = copy.deepcopy(dense)
        net.zero_grad()
        gm.nn.tensor_parallel(
            net,
            {"0": first, "2": "row"},
            sequence_dim=0 if rows else None,
            rows=rows,
            sizes={"0": (1, 0, 4), "2": (1, 0, 4)},
        )
        if first != "column":
            net[2].base_layer.split_input = net[2].lora_A["default"].split_input = True
        y = net(gm.shard(x) if rows else x)
        y.pow(3).sum().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.requires_grad:
                    parameter.copy_(parameter.grad)
        whole = gm.all_gather(y.detach(), sizes="auto") if rows else y.detach()
        return whole, gm.nn.dense_state_dict(net), [each.requires_grad for each in net.parameters()]

    for y, state, learns in threads(3)(found):
        torch.testing.assert_close(y, dense(x).detach())
        assert sum(learns) == 4
        for name, slope in trained.items():
            torch.testing.assert_close(state[name], slope)


def test_an_adapter_that_changes_a_sharded_parameter_is_refused_by_the_name_of_the_layer(
    threads: Threads,
) -> None:
    class _LoraParameterProxy(nn.Module):
        """What peft registers on a parameter in each call, for `target_parameters`."""

        def forward(self, weight: Tensor) -> Tensor:
            return weight + 1

    def found() -> str:
        net: Any = _filled(nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 4))}))
        gm.nn.tensor_parallel(net, {"a.0": "column"})
        nn.utils.parametrize.register_parametrization(net["a"][0], "weight", _LoraParameterProxy())
        with pytest.raises(
            gm.ArgumentError, match=r"changes the sharded parameter weight of 'a\.0'"
        ) as caught:
            net["a"][0](torch.zeros(1, 2, dtype=torch.float64))
        return str(caught.value)

    for text in threads(2)(found):
        assert "target_modules before tensor_parallel" in text


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft of names in transformers
def test_lora_of_peft_on_a_gpt2_of_transformers_is_that_of_the_dense_model(threads: Threads) -> None:
    transformers: Any = pytest.importorskip("transformers")
    peft: Any = pytest.importorskip("peft")
    shape = {"n_positions": 8, "n_embd": 12, "n_layer": 1, "n_head": 3, "bos_token_id": 0, "eos_token_id": 0}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=29, **shape, **off)).double()
    lora = peft.LoraConfig(r=2, target_modules=["c_fc", "mlp.c_proj"], fan_in_fan_out=True)
    dense = peft.get_peft_model(model, lora).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 5)
    ids = torch.randint(0, 29, (2, 7), generator=generator)
    loss = dense(ids, labels=ids).loss
    loss.backward()
    trained = {name: each.grad for name, each in dense.named_parameters() if each.requires_grad}
    assert len(trained) == 4

    def found() -> tuple[Tensor, dict[str, Tensor]]:
        net: Any = copy.deepcopy(dense)
        net.zero_grad()
        gm.nn.tensor_parallel(net, {"*.c_fc": "column", "*.mlp.c_proj": "row"})
        loss = net(ids, labels=ids).loss
        loss.backward()
        slopes = {name: each.grad for name, each in net.named_parameters() if each.requires_grad}
        state = gm.nn.dense_state_dict(net)
        assert all(torch.equal(state[name], each) for name, each in dense.named_parameters())
        cuts = {name: each.cuts for name, each in net.named_modules() if hasattr(each, "cuts")}
        whole = {}
        for name, slope in slopes.items():
            cut = cuts.get(name.removesuffix(".weight"), {}).get("weight")
            whole[name] = slope if cut is None else gm.all_gather(slope, dim=cut.dim, sizes=cut.sizes)
        merged: Tensor = net.merge_and_unload()(ids, labels=ids).loss
        torch.testing.assert_close(merged, loss)
        return loss.detach(), whole

    for value, slopes in threads(2)(found):
        torch.testing.assert_close(value, loss.detach())
        for name, slope in trained.items():
            torch.testing.assert_close(slopes[name], slope)


def test_a_parallel_layer_shows_the_name_that_it_has_in_its_module(threads: Threads) -> None:
    def found() -> tuple[str, str]:
        net: Any = nn.ModuleDict({"a": _filled(nn.Sequential(nn.Linear(2, 4)))})
        gm.nn.tensor_parallel(net, {"a.0": "column"})
        with pytest.raises(gm.ArgumentError) as caught:
            net["a"](torch.zeros(1, 3, dtype=torch.float64))
        return repr(net["a"][0]), str(caught.value)

    for text, error in threads(2)(found):
        assert text == "ColumnParallelLinear(2, 4, local (2, 2), 'a.0')"
        assert "'a.0'" in error


@pytest.mark.parametrize("kind", ["column", "row", "vocab"])
def test_a_sequence_that_the_ranks_do_not_divide_has_a_remedy(threads: Threads, kind: Any) -> None:
    def found(rows: Any) -> str:
        layer: nn.Module = nn.Embedding(4, 4) if kind == "vocab" else nn.Linear(4, 4)
        net = gm.nn.tensor_parallel(nn.Sequential(_filled(layer)), {"0": kind}, sequence_dim=0, rows=rows)
        x = torch.zeros(5, 2 if kind == "row" else 4, dtype=torch.float64)
        x = x[:, 0].long() if kind == "vocab" else gm.shard(x) if kind == "column" else x
        try:
            return str(tuple(net(x).shape))
        except (gm.ShapeError, gm.MismatchError) as error:
            return str(error)

    for text in threads(2)(found, None):
        assert 'remedy    pass rows="balanced" to gradmesh.nn.tensor_parallel' in text
    assert threads(2)(found, "balanced") == ["(5, 2)"] * 2 if kind == "column" else ["(3, 4)", "(2, 4)"]
