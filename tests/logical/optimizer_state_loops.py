"""Ordinary loops on one (7, 5) batch that read, change, copy, save and load the state of optimizers: for `zero=`."""

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import torch
from logical.optimizer_loops import Doubled, Loop, adam, list_state, list_values, make_model, step
from torch import Tensor
from torch.optim import Optimizer


def resume(through_file: bool) -> Loop:
    """Return a loop that saves and loads model and optimizer between steps."""

    def run(batch: Tensor) -> Any:
        model = make_model()
        optimizer = adam(model.parameters(), amsgrad=True)
        for _ in range(2):
            step(model, optimizer, batch)
        saved: Any = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if through_file:
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
        else:
            saved = copy.deepcopy(saved)
        for _ in range(2):
            step(model, optimizer, batch)
        other = make_model(seed=3)
        resumed = adam(other.parameters(), amsgrad=True)
        other.load_state_dict(saved["model"]), resumed.load_state_dict(saved["optimizer"])
        before = list_state(resumed)
        losses = [step(other, resumed, batch) for _ in range(2)]
        kinds = {str(value.dtype) for entries in saved["optimizer"]["state"].values() for value in entries.values()}
        return losses, before, kinds, list_values(model), list_values(other), list_state(optimizer, resumed)

    return run


def keep_state_dict(batch: Tensor) -> Any:
    """A state dict that is not copied changes with the steps, as on one device."""
    model = make_model()
    optimizer = adam(model.parameters())
    step(model, optimizer, batch)
    kept = optimizer.state_dict()
    first = kept["state"][0]["exp_avg"]
    before = first.sum().item()
    step(model, optimizer, batch)
    after = first.sum().item()
    optimizer.load_state_dict(kept)
    step(model, optimizer, batch)
    return before, after, first.clone(), list_state(optimizer), list_values(model)


def load_twice(batch: Tensor) -> Any:
    """A loaded state is the optimizer's own from then on: steps change what the script has loaded."""
    model = make_model()
    optimizer = adam(model.parameters())
    step(model, optimizer, batch)
    loaded = copy.deepcopy(optimizer.state_dict())
    seen = []
    for _ in range(3):
        optimizer.load_state_dict(loaded)
        step(model, optimizer, batch), step(model, optimizer, batch)
        seen.append(loaded["state"][0]["exp_avg"].clone())
    return seen, list_values(model), list_state(optimizer)


def save_sometimes(batch: Tensor) -> Any:
    """A state dict that is taken under a condition, and only partly read."""
    model = make_model()
    optimizer, best, kept = adam(model.parameters()), float("inf"), None
    for _ in range(4):
        loss = step(model, optimizer, batch)
        if loss < best:
            best, kept = loss, copy.deepcopy(optimizer.state_dict())
    assert kept is not None
    return best, kept["state"][1]["exp_avg_sq"], list_values(model)


def read_state(batch: Tensor) -> Any:
    model = make_model()
    optimizer, seen = adam(model.parameters()), []
    for _ in range(3):
        step(model, optimizer, batch)
        moments = optimizer.state[model[0].weight]["exp_avg"]
        row = moments[0]
        seen += [moments.norm().item(), (batch.detach() * moments[1]).sum(), (moments @ batch.detach().t()).sum()]
        step(model, optimizer, batch)
        seen += [row.clone(), moments.numpy().copy(), str(moments.shape)]
    return seen, list_values(model)


def change_state(batch: Tensor) -> Any:
    model = make_model()
    optimizer = adam(model.parameters())
    for _ in range(3):
        step(model, optimizer, batch)
        for entries in optimizer.state.values():
            entries["exp_avg"].mul_(0.5)
            entries["exp_avg_sq"][0].zero_()
        optimizer.state[model[3].weight]["exp_avg"] = torch.full((5, 6), 0.01)
    optimizer.state[model[4].bias] = {}
    step(model, optimizer, batch)
    return list_values(model), list_state(optimizer)


def copy_optimizer(batch: Tensor) -> Any:
    """Copies of model and optimizer, whole and by pickle, train on their own."""
    model = make_model()
    optimizer = adam(model.parameters())
    step(model, optimizer, batch)
    pair = copy.deepcopy((model, optimizer))
    pickled = pickle.loads(pickle.dumps((model, optimizer)))  # written a line before
    losses = [step(*each, batch) for each in ((model, optimizer), pair, pickled) for _ in range(2)]
    return losses, *(list_values(each[0]) for each in (pair, pickled)), list_state(optimizer, pair[1], pickled[1])


def hook_steps(batch: Tensor) -> Any:
    """Hooks on a step, a state dict and its loading see whole parameters and state."""
    model = make_model()
    optimizer, seen = adam(model.parameters()), []

    def note(own: Optimizer, *_: Any) -> None:
        seen.append([item.shape for group in own.param_groups for item in group["params"]])
        seen.append([entries["exp_avg"].norm().item() for entries in own.state.values()])

    optimizer.register_step_pre_hook(note)  # type: ignore[arg-type]
    optimizer.register_step_post_hook(note)  # type: ignore[arg-type]
    optimizer.register_state_dict_post_hook(lambda _, found: found | {"more": 1})
    losses = [step(model, optimizer, batch) for _ in range(3)]
    return losses, seen, optimizer.state_dict()["more"], list_values(model)


def forget_models(batch: Tensor) -> Any:
    """Models and optimizers that a script drops are freed."""
    kept = []
    for seed in range(3):
        model = make_model(seed)
        optimizer = adam(model.parameters())
        step(model, optimizer, batch), step(model, optimizer, batch)
        optimizer.state_dict()["state"][0]["exp_avg"].sum()
        kept.append(weakref.ref(optimizer)), kept.append(weakref.ref(model[0].weight))
        del model, optimizer
    gc.collect()
    return [reference() is None for reference in kept]


def move_state(batch: Tensor) -> Any:
    """A state that another optimizer takes over, of the same kind and of another one."""
    model = make_model()
    first = adam(model.parameters())
    step(model, first, batch)
    second = torch.optim.AdamW(model.parameters(), lr=0.01)
    second.load_state_dict(first.state_dict())
    losses = [step(model, each, batch) for each in (second, first, second)]
    whole = Doubled(model.parameters(), lr=0.01)
    whole.load_state_dict(second.state_dict())
    losses += [step(model, each, batch) for each in (whole, second)]
    return losses, list_values(model), list_state(first, second, whole)


STATE_LOOPS: dict[str, Loop] = {
    "resume": resume(through_file=True),
    "resume from a copy": resume(through_file=False),
    "keep state dict": keep_state_dict,
    "load twice": load_twice,
    "save sometimes": save_sometimes,
    "read state": read_state,
    "change state": change_state,
    "copy optimizer": copy_optimizer,
    "hook steps": hook_steps,
    "forget models": forget_models,
    "move state": move_state,
}
