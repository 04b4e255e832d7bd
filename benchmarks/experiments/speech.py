"""Speech, as in Katharopoulos et al. 2020, section 4.3: time and memory of a Whisper by the length of the audio.

    python -m benchmarks.experiments.speech --output benchmarks/results/experiments

Models of Whisper tiny's shape with random weights: what they write means nothing, and quality is not measured. All attention
is softmax, or all of it RFA or elu: the encoder's, the decoder's causal and its cross attention. The audio is read once, and
the decoder then takes one step. Both are timed in turns.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForSpeechSeq2Seq

import hf_rfa  # noqa: F401  # registers the RFA models
from hf_rfa.bench.tasks import interleaved, peak_bytes
from hf_rfa.evaluation.cards import markdown_table
from hf_rfa.io.atomic_io import new_file
from hf_rfa.models.cache_names import cache_argument, returned_cache
from hf_rfa_cli.threads import Load

from ..figures import print_as_is
from .rows import ROWS, SOFTMAX

SHAPE = {"d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6}
SHAPE |= {"decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536}
COMPARED = (SOFTMAX, "RFA-Gaussian", "elu")
#: Positions of the encoder in a second of audio, and frames of its input in a position.
POSITIONS_PER_SECOND, FRAMES = 50, 2
#: Features of the decoder's cross attention, as many as Peng et al. 2021 have, and of all other attention.
FEATURES = {"num_features": 64, "num_cross_features": 128, "num_encoder_features": 64}


def model_of(row: str, seconds: int, **shape: Any) -> Any:
    """Return a model of a row with random weights, for audio of some length."""
    options: dict[str, Any] = {**SHAPE, **shape, "max_source_positions": seconds * POSITIONS_PER_SECOND}
    change = ROWS[row]
    if change is not None:
        features = FEATURES if "num_features" not in change else dict.fromkeys(FEATURES)
        options |= {**change, **features, "softmax_encoder_layers": []}
    torch.manual_seed(0)
    config = AutoConfig.for_model("whisper" if change is None else "rfa_whisper", **options)
    return AutoModelForSpeechSeq2Seq.from_config(config).eval()


@torch.no_grad()
def measure(seconds: int, steps: int, rows: tuple[str, ...] = COMPARED, **shape: Any) -> list[dict[str, Any]]:
    """Return milliseconds of reading audio of some length and of a decoder's step after it, and the most memory, by row."""
    models = {row: model_of(row, seconds, **shape) for row in rows}
    config = next(iter(models.values())).config
    audio = torch.randn(1, config.num_mel_bins, seconds * POSITIONS_PER_SECOND * FRAMES)
    start = torch.full((1, 1), config.decoder_start_token_id)
    calls = {row: lambda model=model: model.model.encoder(audio) for row, model in models.items()}
    reading = interleaved(calls, steps)
    memory = {row: peak_bytes(call, audio.device) for row, call in calls.items()}
    after = {}
    for row, model in models.items():
        read = model.model.encoder(audio)
        cache = returned_cache(model(encoder_outputs=read, decoder_input_ids=start, use_cache=True))
        options = {"encoder_outputs": read, "decoder_input_ids": start, "use_cache": True, **cache_argument(cache)}
        after[row] = lambda model=model, options=options: model(**options)
    step = interleaved(after, 4 * steps)
    return [
        {"row": row, "seconds": seconds, "reading_ms": reading[row], "step_ms": step[row], "peak_bytes": memory[row]}
        for row in rows
    ]


def table(found: list[dict[str, Any]]) -> str:
    """Return the figures as a Markdown table: a row a length, milliseconds of reading, of a step, and peak memory."""
    rows = list(dict.fromkeys(each["row"] for each in found))
    head = ["seconds of audio", *(title for row in rows for title in (f"{row}: reads, ms", "step, ms", "MB"))]
    lines: dict[int, list[str]] = {}
    for each in found:
        cells = lines.setdefault(each["seconds"], [str(each["seconds"])])
        megabytes = "" if each["peak_bytes"] is None else f"{each['peak_bytes'] / 1e6:,.0f}"
        cells += [f"{each['reading_ms']:,.0f}", f"{each['step_ms']:.1f}", megabytes]
    return markdown_table(head, list(lines.values()))


def main() -> None:
    """Measure all lengths, shortest first, and write ``speech.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, nargs="+", default=[8, 15, 30, 60, 120, 240])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/experiments"))
    arguments = parser.parse_args()
    console, load = Console(), Load.now()
    if warning := load.warning():
        console.print(warning, soft_wrap=True)
    found: list[dict[str, Any]] = []
    for seconds in sorted(arguments.seconds):
        found += measure(seconds, arguments.steps)
        print_as_is(table(found), console)
    arguments.output.mkdir(parents=True, exist_ok=True)
    with new_file(arguments.output / "speech.json") as file:
        json.dump({"shape": SHAPE, "machine": str(load), "rows": found}, file, indent=1)


if __name__ == "__main__":
    main()
