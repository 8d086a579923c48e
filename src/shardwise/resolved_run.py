"""A run that is ready to start: settings resolved, model found, data prepared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.config.resolve import (
    purpose_of,
    world_size,
)
from shardwise.config.schema import Run
from shardwise.data.distillation_batch import DistillationLayout
from shardwise.data.epochs import Epochs
from shardwise.data.layout import BatchLayout, CausalLayout
from shardwise.data.loader import Loader, make_loader
from shardwise.data.mixing import SourceStream, source_names
from shardwise.data.preference_layout import LAYOUTS
from shardwise.data.prepare import Prepared
from shardwise.data.row_renderers import ROW_PURPOSES
from shardwise.data.rows import row_layout
from shardwise.nn.models.adapt import padding_id
from shardwise.nn.models.source import ModelSource
from shardwise.nn.models.teacher import Teacher

if TYPE_CHECKING:
    from shardwise.nn.adapters.apply import Adapted


@dataclass(frozen=True)
class ResolvedRun:
    """A run that is ready to start."""

    run: Run
    reasons: dict[str, str]
    source: ModelSource
    tokenizer: Any
    data: Prepared
    adapted: Adapted
    output: Path
    teacher: Teacher | None = None
    epochs: Epochs | None = None  # of a run that counts in epochs

    @property
    def parameters(self) -> int:
        """Of the base, trained or not."""
        return self.adapted.parameters

    @property
    def ranks(self) -> int:
        return world_size(self.run)

    @property
    def pad_id(self) -> int:
        """The id for padding."""
        return padding_id(self.tokenizer)

    @property
    def layout(self) -> BatchLayout:
        """How documents become what the objective takes."""
        if self.teacher is not None:
            return DistillationLayout(self.pad_id, self.teacher.answers)
        if purpose_of(self.run) in ROW_PURPOSES:
            vocabulary = self.source.config.get_text_config().vocab_size
            return row_layout(self.run.objective, self.tokenizer, self.pad_id, self.run.train.seed, vocabulary)
        return LAYOUTS.get(purpose_of(self.run), CausalLayout)(self.pad_id)

    @property
    def offload_folder(self) -> Path:
        """Where states that are offloaded to disk have their working files."""
        folder = self.run.offload.disk
        return Path(folder).expanduser().absolute() if folder else self.output / "offload"

    def loader(self) -> Loader:
        """The training sequences."""
        data = self.run.data
        return make_loader(self.data.streams(), data, self.run.train.seed, self.layout, data.temperature, self.epochs)

    def last_step(self, step: int, sequences: int) -> int:
        """The step that the run ends with, if it has done so many steps and consumed so many sequences.

        Of a run that counts in epochs, the one that takes its last sequence. After a change of the batch size, or past
        sequences that the guard dropped, that is not where a run from the start ends. DiLoCo workers end together.
        """
        total, rows = self.run.train.steps, self.run.train.batch_size
        assert total is not None
        if self.epochs is None:
            return total
        end = step + self.epochs.steps(rows, sequences)
        capped = total < self.epochs.steps(rows) or self.run.diloco is not None
        return min(total, end) if capped else end

    def eval_loader(self) -> Loader | None:
        """The held-out sequences, if any."""
        data = self.run.data
        if data.eval_sources:
            stores, names = [one.store for one in self.data.eval], source_names(data.eval_sources)
        elif data.eval_share:
            stores, names = [one.held_out for one in self.data.train], source_names(data.train)
        else:
            return None
        streams = [SourceStream(n, s) for n, s in zip(names, stores, strict=True)]
        return make_loader(streams, data, self.run.train.seed, self.layout, 1.0)
