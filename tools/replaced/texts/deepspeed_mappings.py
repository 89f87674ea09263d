import gradmesh as gm


def gather_tokens(input_, dim=0):
    mpu = deepspeed.utils.groups.mpu
    alone = bwc_tensor_model_parallel_world_size(mpu) == 1
    return input_ if alone else gm.all_gather(input_, bwc_tensor_model_parallel_group(mpu), dim, dst=gm.I)


def drop_tokens(input_, dim=0):
    mpu = deepspeed.utils.groups.mpu
    alone = bwc_tensor_model_parallel_world_size(mpu) == 1
    return input_ if alone else gm.shard(input_, bwc_tensor_model_parallel_group(mpu), dim)
