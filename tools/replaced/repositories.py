"""The repositories, in the order of the page."""

from __future__ import annotations

from tools.replaced.contrastive import CONTRASTIVE
from tools.replaced.parallel import PARALLEL
from tools.replaced.repository import Repository
from tools.replaced.science import SCIENCE

REPOSITORIES: tuple[Repository, ...] = (*CONTRASTIVE, *SCIENCE, *PARALLEL)
BY_NAME = {each.name: each for each in REPOSITORIES}
