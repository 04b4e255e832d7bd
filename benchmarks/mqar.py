"""Multi-query associative recall: what attention with a state of fixed size finds again, by the bytes of the state.

    python -m benchmarks.mqar --output mqar-work [--quick] [--part softmax|converted|scratch] [--kind MAP …]

A row of T tokens begins with N pairs of a key and a value. Later the keys return, each once, and the model has to name the
value that stood after it (Arora et al. 2023). A softmax GPT-2 of two layers learns this, is converted with every feature map
and state size, and is measured before and after attention transfer. The same model is also trained with every feature map
from scratch. A window with sinks and no features is given as many bytes as each state.

Finished settings are kept under ``--output`` and not computed again. Parts may run side by side; run ``converted`` after
``softmax``. The table (Markdown), JSON and chart of all that is finished are written there.
"""

from __future__ import annotations

import json
import math
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from hf_rfa import RFAGPT2Config, RFAGPT2LMHeadModel
from hf_rfa.convert import convert
from hf_rfa.convert.calibration import calibrate
from hf_rfa.evaluation.cards import markdown_table
from hf_rfa.evaluation.memory import cache_memory
from hf_rfa.finetune.recipe import Stage
from hf_rfa.finetune.trainers import train_stage
from hf_rfa.inference import load_model
from hf_rfa.io.atomic_io import new_file
from hf_rfa.models.memory import MemoryLayout

from .mqar_rows import QUICK, QUICK_SCRATCH, SCRATCH, TOKENS, Plan, answers, batches, measure, mqar_rows

#: Width of the model, and its standard deviation at first: with GPT-2's 0.02 it does not learn the task in this time.
WIDTH, INITIAL = 64, 0.1
SINKS = 4
#: Last tokens that feature maps trained from scratch see exactly: in place of the short convolution of other studies.
SHORT_WINDOW = 4
SOFTMAX = "softmax"
#: Options of each kind of model, beyond its size.
MAPS: dict[str, dict[str, Any]] = {
    "positive": {"trainable_projection": True},
    "exponential": {},
    "exponential W4": {"feature_map": "exponential", "window_size": SHORT_WINDOW},
    "hedgehog": {},
    "gaussian": {"unit_norm": True, "trainable_projection": True},
    "elu": {},
    "none": {},
}
#: Maps whose number of features follows from the width of a head, and kinds of converted models alone.
FIXED, CONVERTED = ("hedgehog", "elu"), ("exponential W4",)


@dataclass(frozen=True)
class Setting:
    """One model: where it comes from ("softmax", "converted", "scratch"), its feature map, D, and whether it has a gate."""

    origin: str
    kind: str = SOFTMAX
    features: int | None = None
    gate: bool = False

    @property
    def name(self) -> str:
        """A name that is also the name of its file."""
        parts = [self.origin] + ([] if self.origin == self.kind else [self.kind])
        return " ".join(parts + [f"D{self.features}"] * (self.features is not None) + ["gate"] * self.gate)

    def steps(self, plan: Plan) -> int:
        """Return how many steps the model is trained for."""
        return plan.steps if self.origin != "converted" else plan.transfer[2] * (self.kind not in ("elu", "none"))

    def options(self) -> dict[str, Any]:
        """Return the fields of the RFA configuration; without features D is the size whose bytes the window has."""
        if self.kind == "none":
            state = MemoryLayout(heads=1, head_dim=WIDTH, state_rows=self.features or 0)
            token = MemoryLayout(heads=1, head_dim=WIDTH, window=1).bytes_per_place()
            tokens = state.num_bytes() // token  # and 4 bytes that count them
            return {"feature_map": "none", "window_size": tokens - SINKS, "num_sinks": SINKS}
        window = SHORT_WINDOW if self.origin == "scratch" else 0
        options = {"feature_map": self.kind, "gate": self.gate, "window_size": window, **MAPS[self.kind]}
        return options if self.features is None else {**options, "num_features": self.features}

    def conversion(self) -> dict[str, Any]:
        """Return the options of the conversion to `options`."""
        config, preset = self.options(), "exact" if self.kind == "none" else "rfa"
        named = ("feature_map", "num_features", "gate", "window_size", "num_sinks")
        options = {name: config.pop(name) for name in named if name in config}
        return {"preset": preset, "num_slots": 0, "config": config or None, **options}


def train(model: Any, plan: Plan, seed: int, on_step: Callable[[], None]) -> None:
    """Train a model in place, with AdamW and a cosine."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.rate, betas=(0.9, 0.98), weight_decay=0.0)
    warm_up = min(100, plan.steps // 10 + 1)
    cosine = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm_up) * (1 + math.cos(math.pi * step / plan.steps)) / 2
    )
    model.train()
    for rows in batches(plan, seed):
        F.cross_entropy(*answers(model, rows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        cosine.step()
        on_step()


def new_model(setting: Setting, plan: Plan, seed: int) -> Any:
    """Return an untrained model of two layers with one head, whose positions start as sinusoids."""
    torch.manual_seed(seed)
    positions = max(length for length, *_ in (*plan.tests, *plan.train, *plan.curriculum))
    sizes = {"vocab_size": plan.vocab, "n_positions": positions, "n_embd": WIDTH, "n_inner": WIDTH, "n_layer": 2}
    others = {"n_head": 1, "initializer_range": INITIAL, "bos_token_id": 0, "eos_token_id": 0}
    fields: dict[str, Any] = {**sizes, **others, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)}
    if setting.kind == SOFTMAX:
        model: Any = GPT2LMHeadModel(GPT2Config(**fields))
    else:
        model = RFAGPT2LMHeadModel(RFAGPT2Config(**fields, **setting.options()))
    angles = torch.arange(positions)[:, None] * 10_000 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
    model.transformer.wpe.weight.data = INITIAL * torch.cat([angles.sin(), angles.cos()], dim=1)
    return model


def transfer(model: Any, teacher: Any, plan: Plan, seed: int, on_step: Callable[[], None]) -> None:
    """Let the feature maps learn the teacher's attention on new rows, in place."""
    length, pairs, steps = plan.transfer
    size = TOKENS // length
    ids, _ = mqar_rows(steps * size, length, pairs, vocab=plan.vocab, seed=3_000_000 + seed)
    rows, stage = [{"input_ids": row} for row in ids], Stage(steps=steps, batch_size=size)

    def progress(name: str | None, _: int) -> None:
        if name is None:
            on_step()

    with tempfile.TemporaryDirectory() as work:
        train_stage("transfer", model, teacher, rows, stage, Path(work), seed=seed, progress=progress)


def run(setting: Setting, plan: Plan, folder: Path, seed: int, on_step: Callable[[], None]) -> dict[str, Any]:
    """Train or convert one model, and return its accuracies by stage, its memory in bytes, and seconds."""
    started, stages = perf_counter(), {}
    if setting.origin == "converted":
        with tempfile.TemporaryDirectory() as place:
            convert(folder / "softmax", Path(place) / "rfa", seed=seed, **setting.conversion())
            model, _ = load_model(str(Path(place) / "rfa"), need_tokenizer=False)
        teacher, _ = load_model(str(folder / "softmax"), need_tokenizer=False)
        length, pairs, _ = plan.transfer
        ids, _ = mqar_rows(TOKENS // length, length, pairs, vocab=plan.vocab, seed=2_000_000 + seed)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        calibrate(model, teacher, inputs, on_layer=lambda: None, to_train=True)
        stages["before transfer"] = measure(model, plan)
        if setting.steps(plan):
            transfer(model, teacher, plan, seed, on_step)
            stages["after transfer"] = measure(model, plan)
    else:
        model = new_model(setting, plan, seed)
        train(model, plan, seed, on_step)
        stages["trained"] = measure(model, plan)
        if setting.origin == "softmax":
            model.save_pretrained(folder / "softmax")
    memory = asdict(cache_memory(model.eval()))
    return {**asdict(setting), "stages": stages, "memory": memory, "seconds": perf_counter() - started}


def settings_of(plan: Plan, parts: list[str], kinds: list[str]) -> list[Setting]:
    """Return the settings of some parts, of some feature maps; the softmax model is the first."""
    found = [Setting(SOFTMAX)] if SOFTMAX in parts else []
    if "converted" in parts:
        found += [Setting("converted", kind) for kind in kinds if kind in FIXED]
        sized = [kind for kind in kinds if kind not in (*FIXED, SOFTMAX)]
        found += [Setting("converted", kind, size) for size in plan.converted for kind in sized]
    if "scratch" in parts:
        found += [Setting("scratch")] * (SOFTMAX in kinds)
        for gate in (False, True):
            left_out = (SOFTMAX, *CONVERTED, *["none"] * gate)
            allowed = [kind for kind in kinds if kind not in left_out]
            found += [Setting("scratch", kind, None if kind in FIXED else plan.scratch, gate) for kind in allowed]
    return found


def finished(folder: Path, plans: dict[str, Plan], seed: int) -> dict[str, Any]:
    """Return the results in a folder by name; those of another plan or seed do not count."""
    wanted = {origin: json.loads(json.dumps([asdict(plan), seed])) for origin, plan in plans.items()}
    found = {path.stem: json.loads(path.read_text()) for path in sorted((folder / "settings").glob("*.json"))}
    results = {name: each["result"] for name, each in found.items()}
    return {
        name: result
        for name, result in results.items()
        if [found[name]["plan"], found[name]["seed"]] == wanted[result["origin"]]
    }


def rows_of(results: dict[str, Any], plan: Plan) -> list[list[str]]:
    """Return the lines of the table, its head the first: a line for every setting and stage."""
    lines = [["model", "D", "state, bytes", "stage", *(f"{length}, {pairs}" for length, pairs in plan.tests)]]
    origins = [SOFTMAX, "converted", "scratch"]

    def place(result: dict[str, Any]) -> tuple[int, str, bool, int]:
        return origins.index(result["origin"]), result["kind"], result["gate"], result["features"] or 0

    for result in sorted(results.values(), key=place):
        origin, kind, memory = result["origin"], result["kind"], result["memory"]
        model = origin if origin == kind else f"{origin} {kind}{', gate' * result['gate']}"
        fixed = f"{memory['state'] + memory['window']:,}"
        head = [model, str(result["features"] or ""), f"{memory['per_token']:,} T" if memory["per_token"] else fixed]
        for stage, shares in result["stages"].items():
            lines.append([*head, stage, *(f"{100 * share:.1f}" for share in shares.values())])
    return lines


def plot(results: dict[str, Any], plan: Plan, path: Path) -> None:
    """Draw accuracy against bytes of state: a panel for each kind of test rows, a line for each kind of model."""
    columns = min(3, len(plan.tests))
    figure = Figure(figsize=(4.2 * columns, 3.2 * math.ceil(len(plan.tests) / columns)), layout="constrained")
    panels = figure.subplots(math.ceil(len(plan.tests) / columns), columns, squeeze=False).flat
    colors = {kind: f"C{index}" for index, kind in enumerate(MAPS)} | {SOFTMAX: "black"}
    for axes, (length, pairs) in zip(panels, plan.tests, strict=False):
        lines: dict[tuple[str, str, bool], list[tuple[float, float]]] = {}
        for result in results.values():
            memory, shares = result["memory"], list(result["stages"].values())[-1]
            used = memory["state"] + memory["window"] + length * memory["per_token"]
            share = 100 * shares[f"{length}, {pairs}"]
            lines.setdefault((result["origin"], result["kind"], result["gate"]), []).append((used, share))
        for (origin, kind, gate), points in sorted(lines.items()):
            style = {"converted": "o-", "scratch": "^" if gate else "s"}.get(origin, "*")
            label = origin if origin == kind else f"{kind}{', gate' * gate}, {origin}"
            filled = colors[kind] if origin != "scratch" else "none"
            x, y = zip(*sorted(points), strict=True)
            axes.plot(x, y, style, label=label, markerfacecolor=filled, color=colors[kind])
        axes.axhline(100 / pairs, color="gray", linestyle=":", linewidth=1)
        axes.set(title=f"{length} tokens, {pairs} pairs", ylim=(-4, 104), xscale="log")
        axes.set(xlabel="bytes of state (keys and values for softmax)", ylabel="right answers, %")
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), fontsize=7, loc="outside right center")
    figure.savefig(path, dpi=150)


def report(folder: Path, plans: dict[str, Plan], seed: int, console: Console) -> None:
    """Write the results of a folder as JSON, Markdown and a chart, and print the table."""
    results, plan = finished(folder, plans, seed), plans[SOFTMAX]
    if not results:
        return
    with new_file(folder / "mqar.json") as file:
        described = {origin: asdict(each) for origin, each in plans.items()}
        json.dump({"plans": described, "seed": seed, "results": results}, file, indent=1)
    head, *lines = rows_of(results, plan)
    with new_file(folder / "mqar.md") as file:
        file.write(markdown_table(head, lines) + "\n")
    table = Table(*head, title="right answers in %, by T, N", box=box.SIMPLE)
    for line in lines:
        table.add_row(*line)
    console.print(table)
    plot(results, plan, folder / "mqar.png")


def main() -> None:
    """Run the settings that are not finished."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small vocabulary and few settings, in minutes")
    parts = [SOFTMAX, "converted", "scratch"]
    parser.add_argument("--part", action="append", choices=parts, help="default: all")
    parser.add_argument("--kind", action="append", choices=[SOFTMAX, *MAPS], help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("mqar-work"), help="folder for results and the checkpoint")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    folder, seed = arguments.output, arguments.seed
    plan, scratch = (QUICK, QUICK_SCRATCH) if arguments.quick else (Plan(), SCRATCH)
    plans = {SOFTMAX: plan, "converted": plan, "scratch": scratch}
    kinds = arguments.kind or (["exponential", "exponential W4", "none"] if arguments.quick else [SOFTMAX, *MAPS])
    (folder / "settings").mkdir(parents=True, exist_ok=True)
    done = finished(folder, plans, seed)
    todo = [each for each in settings_of(plan, arguments.part or parts, kinds) if each.name not in done]
    if todo and todo[0].origin == "converted" and SOFTMAX not in done:
        parser.error("nothing to convert: train the softmax model first (--part softmax)")
    console = Console()
    with Progress(console=console) as progress:
        total = progress.add_task("", total=sum(each.steps(plans[each.origin]) for each in todo))
        for setting in todo:
            progress.update(total, description=setting.name)
            plan = plans[setting.origin]
            result = run(setting, plan, folder, seed, lambda: progress.advance(total))
            with new_file(folder / "settings" / f"{setting.name}.json") as file:
                json.dump({"plan": asdict(plan), "seed": seed, "result": result}, file, indent=1)
            last = list(result["stages"].values())[-1]
            shown = ", ".join(f"({kind}) {100 * share:.1f}" for kind, share in last.items())
            progress.console.print(f"{setting.name}: {shown} % in {result['seconds']:.0f} s")
    report(folder, plans, seed, console)


if __name__ == "__main__":
    main()
