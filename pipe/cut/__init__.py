"""Cuts a model into the parts of a pipeline's ranks."""

from .cutting import cut_model
from .part import Block, Flow, Part, Placement
from .plain_models import Sides

__all__ = ["Block", "Flow", "Part", "Placement", "Sides", "cut_model"]
