from .ring_flash_attn import RingFlashAttnFunc


class ZigZagRingFlashAttnFunc(RingFlashAttnFunc):
    order = "zigzag"
