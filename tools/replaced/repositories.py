"""The repositories, in the order of the page."""

from __future__ import annotations

from tools.replaced.attention import ATTENTION
from tools.replaced.contrastive import CONTRASTIVE
from tools.replaced.parallel import PARALLEL
from tools.replaced.repository import Repository
from tools.replaced.science import SCIENCE
from tools.replaced.spheres import SPHERES

REPOSITORIES: tuple[Repository, ...] = (*CONTRASTIVE, *SCIENCE, *SPHERES, *PARALLEL, *ATTENTION)
BY_NAME = {each.name: each for each in REPOSITORIES}
