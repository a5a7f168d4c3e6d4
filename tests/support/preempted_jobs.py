"""Scripts that are asked to stop at any step and started again, and the same training in plain PyTorch."""

MODELS = """
import os, signal, sys, time
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
first = nn.Linear(4, 8, bias=False)  # Adam makes a step of rounding noise where the gradient is zero
model = nn.Sequential(first, nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
inputs = torch.cos(torch.outer(torch.arange(67.0), torch.arange(1.0, 5.0)))
data = torch.utils.data.TensorDataset(inputs, torch.sin(torch.arange(67.0))[:, None])
"""
RESULTS = """
torch.save({"model": model.state_dict(), "states": optimizer.state_dict()["state"], "losses": losses}, "results.pt")
"""

PLAIN = (
    MODELS
    + """
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, **READERS)
losses = []
for epoch in range(4):
    held = []
    for number, batch in enumerate(loader, start=1):
        held.append(batch)
        if len(held) < EVERY and number < len(loader):
            continue
        optimizer.zero_grad()
        for rows, targets in held:
            loss = nn.functional.mse_loss(model(rows), targets)
            losses.append(loss.item())
            (loss * len(rows) / sum(len(each) for each, _ in held)).backward()
        optimizer.step()
        held = []
    schedule.step()
"""
    + RESULTS
)
"""Makes a step of `EVERY` batches, which `READERS` read."""

ASKED = """
import rankless

calls, losses = 0, []


def count_call():
    \"\"\"Ask the run to stop, if this is the rank and the call that STOP names.\"\"\"
    global calls
    calls += 1
    time.sleep(float(os.environ.get("PAUSE", "0")))
    if os.environ.get("STOP") == f"{os.environ.get('RANK', '0')}:{calls}":
        os.kill(os.getpid(), signal.SIGTERM)
"""

TRAINING = (
    MODELS
    + ASKED
    + """
loader = rankless.loader(data, batch_size=8, shuffle=True)
checkpoints = rankless.checkpoints("kept", keep_last=2, autosave=True)


@rankless.job(model=model, optimizer=optimizer)
def train(inputs, targets):
    return nn.functional.mse_loss(model(inputs), targets)


found = checkpoints.load(model=model, optimizer=optimizer, loader=loader, schedule=schedule)
step = found.step if found else 0
for epoch in range(loader.finished_epochs, 4):
    for inputs, targets in loader:
        losses.append(float(train(inputs, targets)))
        step += 1
        count_call()
    schedule.step()
"""
    + RESULTS
)

SAVE = "checkpoints.save(step, model=model, optimizer=optimizer, loader=loader, schedule=schedule)"
VALIDATED = TRAINING.replace(
    "\nfound =",
    """
valid = rankless.loader(data, batch_size=16, generator=torch.Generator())


@rankless.job(model=model)
def measure(inputs):
    return model(inputs).sum()


def validate():
    model.eval()
    for inputs, _ in valid:
        measure(inputs)
        count_call()
    model.train()


found =""",
)
FORMS = {
    "plain": TRAINING,
    "accumulated": TRAINING.replace("optimizer=optimizer)\ndef", "optimizer=optimizer, accumulate=2)\ndef"),
    "divided": TRAINING.replace("optimizer=optimizer)\ndef", 'optimizer=optimizer, zero="parameters")\ndef'),
    "validated between steps": VALIDATED.replace(
        "        count_call()\n    sch",
        "        count_call()\n        if step % 3 == 0:\n            validate()\n    sch",
    ),
    "validated between passes": VALIDATED.replace("    schedule.step()\n", "    validate()\n    schedule.step()\n"),
    "readers": TRAINING.replace("shuffle=True)", "shuffle=True, num_workers=1, persistent_workers=True)"),
    "in the background": TRAINING.replace("autosave=True", 'autosave=True, background=True, layout="sharded"'),
    "saved too": TRAINING.replace(
        "count_call()\n    s", f"count_call()\n        if step % 4 == 0:\n            {SAVE}\n    s"
    ),
    "numbered by passes": TRAINING.replace("autosave=True", "autosave=lambda: loader.finished_epochs").replace(
        "    schedule.step()\n", f"    schedule.step()\n    {SAVE.replace('(step', '(epoch + 1')}\n"
    ),
    "without an end of passes": TRAINING.replace(
        """for epoch in range(loader.finished_epochs, 4):
    for inputs, targets in loader:
        losses""",
        """batches = iter(loader)
for step in range(step, 36):
    if True:
        try:
            inputs, targets = next(batches)
        except StopIteration:
            schedule.step()
            batches = iter(loader)
            inputs, targets = next(batches)
        losses""",
    ).replace("        step += 1\n        count_call()\n    schedule.step()\n", "        count_call()\n"),
    "asked in the loop": TRAINING.replace(", autosave=True", "").replace(
        "count_call()\n    s",
        f"count_call()\n        if rankless.stopping():\n            {SAVE}\n            sys.exit()\n    s",
    ),
    "own handler": TRAINING.replace(
        "\ncalls,", '\nsignal.signal(signal.SIGTERM, lambda *_: print("own handler"))\ncalls,'
    ),
    "closed by finally": TRAINING.replace("for epoch", "try:\n  for epoch", 1)
    .replace("    for inputs, targets in", "   for inputs, targets in", 1)
    .replace("    schedule.step()\n", '   schedule.step()\nexcept Exception:\n  raise\nfinally:\n  print("closed")\n'),
}
"""Scripts that make the training of `PLAIN`, in the forms in which people write them."""
