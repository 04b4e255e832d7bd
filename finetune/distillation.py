"""Distillation: a converted model learns from its softmax parent.

Two stages, each a transformers `Trainer`:

1. attention transfer: every RFA layer at once learns the softmax weights of the parent's layer, on the parent's inputs. Only
   feature maps and gates are trained. As the weights of a layer depend on its own φ alone, all layers learn independently
   (attention distillation as in Zhang et al. 2024, section 4.2, with random features as the start).
2. end to end: the whole model learns the parent's logits, by KL(parent ‖ model), beside the loss on the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainingArguments,
    set_seed,
)

from hf_rfa.convert.activations import capture_inputs, layer_activations, layer_divergence, padding_masks
from hf_rfa.convert.base_model import rfa_layers
from hf_rfa.convert.calibration_data import Inputs
from hf_rfa.convert.pipeline import Progress

from .lora import add_lora, merge_lora
from .param_groups import ParameterKind, is_rfa_parameter, parameter_groups
from .run_folder import last_checkpoint


@dataclass(frozen=True)
class StageResult:
    """What one stage of training did.

    Attributes:
        name: of the stage.
        steps: optimiser steps.
        log: what the Trainer logged, in order: losses, learning rates, gradient norms.
    """

    name: str
    steps: int
    log: tuple[dict[str, float], ...]


def transfer_losses(
    model: nn.Module, teacher: PreTrainedModel, inputs: Inputs, *, output_weight: float = 0.0
) -> dict[str, Tensor]:
    """Return KL(softmax ‖ implied) of every RFA layer on one batch, in nats per query, [H] each.

    Args:
        model: the RFA model, whose projections are still the teacher's.
        teacher: the model whose layers' inputs are used: the softmax model, or ``model`` itself.
        inputs: a batch as the models take it.
        output_weight: weight of the relative squared error of the attention's outputs, added to the KL.
    """
    layers = rfa_layers(model)
    with torch.no_grad(), capture_inputs({name: teacher.get_submodule(name) for name in layers}) as recorded:
        body: Any = teacher.base_model
        body(**{name: tensor for name, tensor in inputs.items() if name != "labels"}, use_cache=False)
    masks = padding_masks(inputs)
    losses = {}
    for name, layer in layers.items():
        if name not in recorded:
            continue
        with torch.no_grad():
            sample = layer_activations(layer, recorded[name], masks)
        with torch.autocast(sample.key.device.type, enabled=False):
            losses[name] = layer_divergence(layer, sample, recorded.pop(name)[0], output_weight=output_weight)
    return losses


class AttentionTransferTrainer(Trainer):
    """Stage 1: the loss is the mean over heads and layers of `transfer_losses`.

    Args:
        teacher: the softmax model.
        own_inputs: share of the steps, the last ones, on the inputs that the layers have in the RFA model itself.
        output_weight: see `transfer_losses`.
    """

    def __init__(
        self, *args: Any, teacher: PreTrainedModel, own_inputs: float = 0.0, output_weight: float = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.teacher, self.own_inputs, self.output_weight = teacher, own_inputs, output_weight

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of one batch."""
        unwrapped: Any = self.accelerator.unwrap_model(model)
        late = self.state.global_step >= round((1.0 - self.own_inputs) * self.state.max_steps)
        source = unwrapped if late else self.teacher
        losses = transfer_losses(unwrapped, source, inputs, output_weight=self.output_weight)
        loss = torch.stack([loss.mean() for loss in losses.values()]).mean()
        return (loss, {}) if return_outputs else loss


class LogitDistillationTrainer(Trainer):
    """Stage 2: KL(teacher ‖ model) of the logits, and the loss on the text.

    Args:
        teacher: the softmax model; not needed where ``kl_weight`` is 0.
        kl_weight: share of the KL in the loss, from 0 to 1.
    """

    def __init__(self, *args: Any, teacher: PreTrainedModel | None, kl_weight: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher, self.kl_weight = teacher, kl_weight
        self.model_accepts_loss_kwargs = False

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of one batch."""
        outputs = model(**inputs, use_cache=False)
        if self.kl_weight == 0 or self.teacher is None:
            return (outputs.loss, outputs) if return_outputs else outputs.loss
        with torch.no_grad():
            known = {name: tensor for name, tensor in inputs.items() if name != "labels"}
            expected = self.teacher(**known, use_cache=False).logits
        logits, labels = outputs.logits, inputs["labels"]
        if not self.teacher.config.is_encoder_decoder:  # a label is what the token before it predicts
            logits, expected, labels = logits[:, :-1], expected[:, :-1], labels[:, 1:]
        counted = labels != -100
        kl = F.kl_div(
            logits[counted].float().log_softmax(-1),
            expected[counted].float().log_softmax(-1),
            log_target=True,
            reduction="batchmean",
        )
        loss = self.kl_weight * kl + (1.0 - self.kl_weight) * outputs.loss
        return (loss, outputs) if return_outputs else loss


def set_dropout(model: nn.Module, rates: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """Set the rates of a model's dropout, 0 where none is given, and return what they were, by (module, attribute).

    Besides dropout layers, BART's layers hold rates as numbers: ``dropout``, ``activation_dropout``, ``layerdrop``.
    """
    before = {}
    for name, module in model.named_modules():
        for attribute in ("p",) if isinstance(module, nn.Dropout) else ("dropout", "activation_dropout", "layerdrop"):
            rate = getattr(module, attribute, None)
            if isinstance(rate, float):
                before[name, attribute] = rate
                setattr(module, attribute, rates.get((name, attribute), 0.0))
    return before


def _rates(rfa: float, rest: float) -> dict[ParameterKind, float]:
    return {"feature_maps": rfa, "sigma": rfa, "gates": rfa, "projections": rest, "rest": rest}


class StopAtNaN(TrainerCallback):
    """Ends a training whose loss is not finite any more, instead of letting it run on."""

    def on_log(self, args: Any, state: Any, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Look at a loss that was logged."""
        if logs and not math.isfinite(float(logs.get("loss", 0.0))):
            control.should_training_stop = True


class TellSteps(TrainerCallback):
    """Tells a `Progress` of a training's steps: of one that is resumed, of those that are left."""

    def __init__(self, name: str, progress: Progress) -> None:
        self.name, self.progress = name, progress

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Tell how many there are."""
        self.progress(self.name, state.max_steps - state.global_step)

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Tell that one is done."""
        self.progress(None, 1)


def _train(trainer: Trainer, name: str, resume: bool, progress: Progress | None) -> StageResult:
    trainer.add_callback(StopAtNaN())
    trainer.remove_callback(PrinterCallback)  # a line for every loss; they are in the result
    if progress is not None:
        trainer.add_callback(TellSteps(name, progress))
    found = trainer.train(
        resume_from_checkpoint=last_checkpoint(Path(str(trainer.args.output_dir))) if resume else None
    )
    trained: Any = trainer.model
    if not (math.isfinite(found.training_loss) and all(bool(p.isfinite().all()) for p in trained.parameters())):
        raise FloatingPointError(
            f"{name}: the loss is {found.training_loss}. Lower the learning rate, or choose another feature map."
        )
    log = tuple({key: float(value) for key, value in entry.items()} for entry in trainer.state.log_history)
    return StageResult(name, trainer.state.global_step, log)


def transfer_attention(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    data: Dataset,
    arguments: TrainingArguments,
    *,
    own_inputs: float = 0.0,
    output_weight: float = 0.0,
    collate: Callable[[Any], Inputs] | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> StageResult:
    """Train feature maps and gates on the teacher's attention, in place (stage 1).

    Args:
        model: the RFA model; its projections have to be the teacher's still.
        teacher: the softmax model.
        data: batches come from it as ``collate`` makes them.
        arguments: the Trainer's; ``learning_rate`` is that of feature maps and gates.
        own_inputs: see `AttentionTransferTrainer`.
        output_weight: see `transfer_losses`.
        collate: makes a batch of items of ``data``.
        resume: go on from the last whole checkpoint in ``arguments.output_dir``, if there is one.
        progress: told of the steps, as by `hf_rfa.convert.convert`.

    Raises:
        FloatingPointError: if the loss is not finite.
    """
    groups = parameter_groups(model, _rates(arguments.learning_rate, 0.0))
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    use_cache = model.config.use_cache  # which a Trainer sets to its own argument as soon as it is made
    required = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    try:
        trainer = AttentionTransferTrainer(
            model=model,
            args=arguments,
            train_dataset=data,
            data_collator=collate,
            teacher=teacher.eval().requires_grad_(False),
            own_inputs=own_inputs,
            output_weight=output_weight,
            optimizers=(torch.optim.Adam(groups), None),
        )
        return _train(trainer, "attention transfer", resume, progress)
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(required[name])
        model.config.use_cache = use_cache
        model.eval()


def distill_logits(
    model: PreTrainedModel,
    teacher: PreTrainedModel | None,
    data: Dataset,
    arguments: TrainingArguments,
    *,
    rfa_rate: float,
    kl_weight: float,
    dropout: bool = False,
    lora_rank: int = 0,
    collate: Callable[[Any], Inputs] | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> StageResult:
    """Train a whole model on the teacher's logits and on the text, in place (stage 2).

    Args:
        model: the model.
        teacher: the softmax model, which may not share weights with ``model``; None if ``kl_weight`` is 0.
        data: see `transfer_attention`.
        arguments: the Trainer's; ``learning_rate`` is that of all but feature maps and gates.
        rfa_rate: learning rate of feature maps and gates.
        kl_weight: share of the KL in the loss, from 0 to 1.
        dropout: whether the model's own dropout acts.
        lora_rank: rank of LoRA matrices to train instead of the weights, and to merge into them; 0 trains the weights.
        collate: see `transfer_attention`.
        resume: see `transfer_attention`.
        progress: see `transfer_attention`.

    Raises:
        FloatingPointError: if the loss is not finite.
    """
    required = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    if lora_rank:
        set_seed(arguments.seed)  # LoRA starts at random
        add_lora(model, lora_rank)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name or is_rfa_parameter(name))
    groups = parameter_groups(model, _rates(rfa_rate, arguments.learning_rate), weight_decay=arguments.weight_decay)
    rates = {} if dropout else set_dropout(model, {})
    use_cache = model.config.use_cache
    trainer = LogitDistillationTrainer(
        model=model,
        args=arguments,
        train_dataset=data,
        data_collator=collate,
        teacher=None if teacher is None else teacher.eval().requires_grad_(False),
        kl_weight=kl_weight,
        optimizers=(torch.optim.AdamW(groups), None),
    )
    try:
        return _train(trainer, "end to end", resume, progress)
    finally:
        if not dropout:
            set_dropout(model, rates)
        if lora_rank:
            merge_lora(model)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(required[name])
        model.config.use_cache = use_cache
        model.eval()
