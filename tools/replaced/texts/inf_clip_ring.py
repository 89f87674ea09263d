import gradmesh as gm


class GradientGather:
    apply = staticmethod(gm.replicate)
