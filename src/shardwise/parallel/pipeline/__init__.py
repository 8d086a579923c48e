"""Pipeline parallelism for any Hugging Face model, whose own forward runs on every stage.

Blocks of other stages are replaced by stand-ins. facts.py traces a tiny model of the same class,
cut.py cuts the large one, stage.py builds a rank's model, schedule.py orders the work, and run.py
executes it.
"""

from shardwise.parallel.pipeline.cut import Cut, StageFacts, cut_model
from shardwise.parallel.pipeline.facts import probe
from shardwise.parallel.pipeline.run import Pipeline
from shardwise.parallel.pipeline.schedule import ActionSpan, Schedule, bubble, picture
from shardwise.parallel.pipeline.stage import NonLastOutput, NoOutputHere, Stages

__all__ = [
    "ActionSpan",
    "Cut",
    "NoOutputHere",
    "NonLastOutput",
    "Pipeline",
    "Schedule",
    "StageFacts",
    "Stages",
    "bubble",
    "cut_model",
    "picture",
    "probe",
]
