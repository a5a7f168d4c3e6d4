"""The order of samples: the sampler and every generator that the sampler or a stream draws from."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from rankless.data.loader_options import LoaderOptions
from rankless.data.loader_position import (
    from_plain_states,
    get_sampler_states,
    list_samplers,
    set_sampler_states,
    to_plain_states,
)
from rankless.data.random_generators import derive_epoch_seed, find_generators, get_states, set_states
from rankless.data.sample_reader import has_plain_columns


class SampleOrder:
    """The order of one loader's samples, equal to a plain `DataLoader`'s."""

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        self.dataset = dataset
        self.options = options
        self.is_stream = isinstance(dataset, IterableDataset)
        """Whether the data set itself decides the order."""
        self.generator = options.generator
        if options.seed is not None:
            self.generator = torch.Generator().manual_seed(options.seed)
        self.sampler: Any = None if self.is_stream else self._make_sampler()
        self.samplers = list_samplers(self.sampler)
        data_generators = find_generators(dataset)
        generators = find_generators(self.generator, *self.samplers)
        known = {id(generator) for generator in data_generators.values()}
        generators = {name: generator for name, generator in generators.items() if id(generator) not in known}
        self.generators = generators | data_generators if self.is_stream else generators
        """The generators that the order is drawn from."""
        self.data_generators = {} if self.is_stream else data_generators
        """The generators that samples are drawn from."""

    def __len__(self) -> int:
        if not self.is_stream:
            return len(self.sampler)  # TypeError if the sampler has no length, as in PyTorch
        size, rows = self.options.batch_size or 1, len(self.dataset)
        return rows // size if self.options.drop_last else -(-rows // size)

    @property
    def stream_saves_state(self) -> bool:
        """Whether the data set is a stream with `state_dict`, read in this process."""
        return self.is_stream and self.options.num_workers == 0 and hasattr(self.dataset, "state_dict")

    @property
    def collates_batches(self) -> bool:
        """Whether samples are collated into batches; otherwise the data set returns whole batches."""
        return self.options.batch_size is not None or self.options.batch_sampler is not None

    def derive_pass_seed(self, number: int) -> int | None:
        """Return the seed of the samples' random numbers in a pass, or None to draw them as `DataLoader` does.

        Without a `seed` option the seed is derived from the number that `DataLoader` will draw next.
        """
        split = self.options.is_split and self.collates_batches
        if not split or self.is_stream or has_plain_columns(self.dataset):
            return None
        if self.options.seed is not None:
            return derive_epoch_seed(self.options.seed, number)
        clone = torch.Generator()
        clone.set_state((self.generator or torch.default_generator).get_state())
        return derive_epoch_seed(
            int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=clone).item()), number
        )

    def settings(self) -> dict[str, Any]:
        """Return the settings that must be equal in a loader that loads this loader's state."""
        names = ("batch_size", "drop_last", "seed")
        return {
            "samples": len(self.dataset) if hasattr(self.dataset, "__len__") else None,
            "samplers": [type(sampler).__name__ for sampler in self.samplers],
            **{name: getattr(self.options, name) for name in names},
            # "auto" reads the same samples with the same random numbers as "split".
            "reading": "split" if self.options.is_split else self.options.reading,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the samplers and of all generators, between two passes."""
        return {
            "sampler": get_sampler_states(self.samplers),
            "order": to_plain_states(get_states(self.generators)),
            "data": to_plain_states(get_states(self.data_generators)),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, between_passes: bool) -> None:
        """Set the states; in the middle of a pass only those of the data's generators."""
        set_states(self.data_generators, from_plain_states(state["data"]))
        if between_passes:
            set_sampler_states(self.samplers, state["sampler"])
            set_states(self.generators, from_plain_states(state["order"]))

    def _make_sampler(self) -> Any:
        """Return the user's batch sampler or PyTorch's; without collation, what yields the keys."""
        options = self.options
        if options.batch_sampler is not None:
            return options.batch_sampler
        sampler: Any = options.sampler
        if sampler is None and options.shuffle:
            sampler = RandomSampler(self.dataset, generator=self.generator)
        elif sampler is None:
            sampler = SequentialSampler(self.dataset)
        return sampler if options.batch_size is None else BatchSampler(sampler, options.batch_size, options.drop_last)
