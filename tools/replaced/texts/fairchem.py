from gradmesh.compat.fairchem import *
