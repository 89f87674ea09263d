import gradmesh as gm


class _AllToAll:
    @staticmethod
    def apply(group, input, output_split_sizes, input_split_sizes):
        return gm.all_to_all(input, group, split_sizes=input_split_sizes, concat_sizes=output_split_sizes)
