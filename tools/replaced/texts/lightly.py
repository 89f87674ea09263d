from gradmesh.compat.ksuit import AllGatherGradAutograd as GatherLayer
