"""One training loop on Accelerate, and the objectives it optimizes."""

from lineardiff.train.classification import ClassificationTask
from lineardiff.train.generation import GenerationTask
from lineardiff.train.interrupt import TrainingInterrupted
from lineardiff.train.loop import train
from lineardiff.train.task import Task

__all__ = [
    "ClassificationTask",
    "GenerationTask",
    "Task",
    "TrainingInterrupted",
    "train",
]
