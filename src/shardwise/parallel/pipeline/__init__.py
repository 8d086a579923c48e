"""Pipeline parallelism for any Hugging Face model: its own forward runs on every stage, with stand-ins for the rest.

facts.py watches a tiny model of the same class, cut.py divides the large one, stage.py makes a rank's model of it,
schedule.py says what is done when, and run.py does it.
"""

from shardwise.parallel.pipeline.cut import Cut, StageFacts, cut_model
from shardwise.parallel.pipeline.facts import probe
from shardwise.parallel.pipeline.run import Pipeline
from shardwise.parallel.pipeline.schedule import ActionSpan, Schedule, bubble, picture
from shardwise.parallel.pipeline.stage import Boundary, NoOutputHere, Stages

__all__ = [
    "ActionSpan",
    "Boundary",
    "Cut",
    "NoOutputHere",
    "Pipeline",
    "Schedule",
    "StageFacts",
    "Stages",
    "bubble",
    "cut_model",
    "picture",
    "probe",
]  # fmt: skip
