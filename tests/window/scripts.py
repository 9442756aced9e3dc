"""Loops as people write them for plain torch: each runs unchanged on a prepared model, and has to give the same numbers."""

from __future__ import annotations

import contextlib
import itertools

import torch

from tests.window.nets import Kit


def plain_steps(kit: Kit) -> None:
    for i in range(4):
        kit.optimizer.zero_grad()
        loss = kit.loss(i)
        kit.note(loss)
        loss.backward()
        kit.optimizer.step()


def clipped_by_torch(kit: Kit) -> None:
    for i in range(4):
        kit.loss(i).backward()
        kit.note(torch.nn.utils.clip_grad_norm_(kit.model.parameters(), 0.5))
        kit.optimizer.step()
        kit.optimizer.zero_grad()


def clipped_by_infinity_norm(kit: Kit) -> None:
    for i in range(3):
        kit.loss(i).backward()
        for p in kit.model.blocks.parameters():
            kit.note(p.grad.norm(float("inf")))
        kit.note(torch.nn.utils.clip_grad_norm_(kit.model.parameters(), 0.1, norm_type=float("inf")))
        kit.optimizer.step()
        kit.optimizer.zero_grad()


def clipped_by_value(kit: Kit) -> None:
    for i in range(3):
        kit.loss(i).backward()
        torch.nn.utils.clip_grad_value_(kit.model.parameters(), 0.05)
        kit.optimizer.step()
        kit.optimizer.zero_grad()


def clipped_twice(kit: Kit) -> None:
    for i in range(3):
        kit.loss(i).backward()
        kit.note(torch.nn.utils.clip_grad_norm_(kit.model.parameters(), 0.3))
        kit.note(torch.nn.utils.clip_grad_norm_(kit.model.parameters(), 0.7))
        kit.optimizer.step()
        kit.optimizer.zero_grad()


def parts_clipped_apart(kit: Kit) -> None:
    for i in range(3):
        kit.loss(i).backward()
        kit.note(torch.nn.utils.clip_grad_norm_(kit.model.head.parameters(), 0.2))
        kit.note(torch.nn.utils.clip_grad_norm_(kit.model.blocks.parameters(), 0.1))
        kit.optimizer.step()
        kit.optimizer.zero_grad()


def more_backward_after_clipping(kit: Kit) -> None:
    for i in range(3):
        kit.loss(2 * i).backward()
        kit.note(torch.nn.utils.clip_grad_norm_(kit.model.parameters(), 0.1))
        kit.loss(2 * i + 1).backward()
        kit.optimizer.step()
        kit.optimizer.zero_grad()


def more_backwards_than_announced(kit: Kit) -> None:
    for i in range(3):
        for k in range(i + 1):
            kit.loss(3 * i + k).backward()
        kit.optimizer.step()
        kit.optimizer.zero_grad()


def head_by_itself_then_the_rest(kit: Kit) -> None:
    for i in range(3):
        hidden = kit.model(kit.rows(i), to_head=False)
        cut = hidden.detach().requires_grad_()
        (10 * kit.model.head(cut)).square().mean().backward()
        hidden.backward(cut.grad)
        if i == 2:
            kit.loss(i).backward()
        kit.optimizer.step()
        kit.optimizer.zero_grad()


def gradients_scaled_by_hand(kit: Kit) -> None:
    for i in range(3):
        kit.loss(i).backward()
        for p in kit.model.parameters():
            p.grad.mul_(0.5)
        for p in kit.model.head.parameters():
            p.grad *= 0.5
        kit.note(sum(float(p.grad.norm()) ** 2 for p in kit.model.parameters()))
        kit.optimizer.step()
        kit.optimizer.zero_grad()


def gradients_of_the_head_dropped(kit: Kit) -> None:
    for i in range(3):
        kit.loss(i).backward()
        for p in kit.model.head.parameters():
            p.grad = None
        kit.note(torch.nn.utils.clip_grad_norm_(kit.model.parameters(), 0.5))
        kit.optimizer.step()
        kit.optimizer.zero_grad()


def gradients_stay_after_the_step(kit: Kit) -> None:
    for i in range(3):
        kit.loss(i).backward()
        torch.nn.utils.clip_grad_norm_(kit.model.parameters(), 0.5)
        kit.optimizer.step()
        kit.note(sum(float(p.grad.norm()) ** 2 for p in kit.model.parameters()))
        kit.optimizer.zero_grad()


def no_zero_grad(kit: Kit) -> None:
    for i in range(4):
        kit.loss(i).backward()
        kit.note(torch.nn.utils.clip_grad_norm_(kit.model.parameters(), 1e9))
        kit.optimizer.step()
        if i == 2:
            kit.optimizer.zero_grad()


def gradients_halved_instead_of_zeroed(kit: Kit) -> None:
    for i in range(3):
        kit.loss(i).backward()
        torch.nn.utils.clip_grad_norm_(kit.model.parameters(), 0.5)
        kit.optimizer.step()
        for p in kit.model.parameters():
            p.grad.mul_(0.5)


def stepped_twice(kit: Kit) -> None:
    for i in range(3):
        kit.loss(i).backward()
        kit.optimizer.step()
        kit.optimizer.step()
        kit.optimizer.zero_grad()


def zeroed_in_place_where_a_part_is_unused(kit: Kit) -> None:
    for i in range(4):
        kit.optimizer.zero_grad(set_to_none=False)
        (kit.loss(i) if i % 2 == 0 else kit.model(kit.rows(i), to_head=False).square().mean()).backward()
        kit.optimizer.step()


def model_zeroed_in_place(kit: Kit) -> None:
    for i in range(3):
        kit.loss(i).backward()
        kit.optimizer.step()
        kit.model.zero_grad(set_to_none=False)
        kit.optimizer.step()


def scaled_by_torch(kit: Kit) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for i in range(3):
        loss = kit.loss(i) * (float("inf") if i == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(kit.optimizer)
        kit.note(torch.nn.utils.clip_grad_norm_(kit.model.parameters(), 0.5) if i != 1 else 0.0)
        scaler.step(kit.optimizer)
        scaler.update()
        kit.optimizer.zero_grad()
    kit.note(scaler.get_scale())


def gradients_set_by_hand(kit: Kit) -> None:
    for i in range(2):
        for k, p in enumerate(kit.model.parameters()):
            p.grad = torch.full(tuple(p.shape), 0.01 * (i + 1) * (k + 1))
        kit.optimizer.step()
        kit.optimizer.zero_grad()


def accumulated_in_one_loop(kit: Kit) -> None:
    for i in range(7):
        (kit.loss(i) / 3).backward()
        if i % 3 == 2 or i == 6:
            kit.note(torch.nn.utils.clip_grad_norm_(kit.model.parameters(), 0.5))
            kit.optimizer.step()
            kit.optimizer.zero_grad()


def model_zero_grad_skips_a_batch(kit: Kit) -> None:
    for i in range(4):
        (50 * kit.loss(i + 10) if i == 1 else kit.loss(i)).backward()
        if i == 1:
            kit.model.zero_grad()
            continue
        kit.optimizer.step()
        kit.model.zero_grad()


def optimizer_zero_grad_skips_a_batch(kit: Kit) -> None:
    for i in range(4):
        (50 * kit.loss(i + 10) if i == 1 else kit.loss(i)).backward()
        if i == 1:
            kit.optimizer.zero_grad()
            continue
        kit.optimizer.step()
        kit.optimizer.zero_grad()


def closures(kit: Kit) -> None:
    for i in range(3):

        def closure(i: int = i) -> torch.Tensor:
            kit.optimizer.zero_grad()
            loss = kit.loss(i)
            loss.backward()
            return loss

        kit.note(kit.optimizer.step(closure))


def failed_forward_is_skipped(kit: Kit) -> None:
    for i in range(4):
        kit.optimizer.zero_grad()
        handle = kit.model.blocks[1].register_forward_pre_hook(_fail) if i == 1 else None
        try:
            loss = kit.loss(i)
        except RuntimeError:
            handle.remove()
            continue
        loss.backward()
        kit.optimizer.step()


def failed_forward_inside_accumulation(kit: Kit) -> None:
    done = 0
    for i in range(6):
        handle = kit.model.blocks[2].register_forward_pre_hook(_fail) if i == 2 else None
        try:
            loss = kit.loss(i) / 2
        except RuntimeError:
            handle.remove()
            continue
        loss.backward()
        done += 1
        if done % 2 == 0:
            kit.optimizer.step()
            kit.optimizer.zero_grad()


def interrupted_forward(kit: Kit) -> None:
    for i in range(4):
        kit.optimizer.zero_grad()
        handle = kit.model.blocks[1].register_forward_pre_hook(_interrupt) if i == 1 else None
        try:
            loss = kit.loss(i)
        except KeyboardInterrupt:
            handle.remove()
            continue
        loss.backward()
        kit.optimizer.step()


def interrupted_evaluation(kit: Kit) -> None:
    for i in range(4):
        handle = kit.model.blocks[1].register_forward_pre_hook(_interrupt) if i == 1 else None
        try:
            with torch.no_grad():
                kit.note(kit.loss(i))
        except KeyboardInterrupt:
            handle.remove()
        kit.optimizer.zero_grad()
        kit.loss(i).backward()
        kit.optimizer.step()


def failed_backward(kit: Kit, error: type[BaseException] = RuntimeError) -> None:
    for i in range(4):
        kit.optimizer.zero_grad()
        handle = None
        if i in (1, 2):
            handle = kit.model.blocks[1].register_forward_hook(_failing_gradient(error))
        loss = kit.loss(i)
        try:
            loss.backward()
        except error:
            handle.remove()
            continue
        kit.optimizer.step()


def stepped_after_a_backward(kit: Kit, failed: bool) -> None:
    """The step of batch 1 has the gradients of batch 1 alone, whether or not a backward `failed` before it."""
    for i in range(3):
        if failed and i == 1:
            handle = kit.model.blocks[1].register_forward_hook(_failing_gradient(ValueError))
            loss = kit.loss(10)
            handle.remove()
            with contextlib.suppress(ValueError):
                loss.backward()
        kit.loss(i).backward()
        kit.optimizer.step()
        kit.optimizer.zero_grad()


def interrupted_backward(kit: Kit) -> None:
    failed_backward(kit, KeyboardInterrupt)


def written_between_steps(kit: Kit) -> None:
    for i in range(4):
        kit.loss(i).backward()
        kit.optimizer.step()
        kit.optimizer.zero_grad()
        with torch.no_grad():
            for p in kit.model.parameters():
                p.clamp_(-0.1, 0.1)


def written_through_data(kit: Kit) -> None:
    for i in range(4):
        kit.loss(i).backward()
        kit.optimizer.step()
        kit.optimizer.zero_grad()
        for p in kit.model.parameters():
            p.data.clamp_(-0.1, 0.1)


def given_other_data(kit: Kit) -> None:
    for i in range(4):
        kit.loss(i).backward()
        kit.optimizer.step()
        kit.optimizer.zero_grad()
        vector = torch.nn.utils.parameters_to_vector(kit.model.parameters()).detach().clone()
        torch.nn.utils.vector_to_parameters(vector * 0.9, kit.model.parameters())


def loaded_between_steps(kit: Kit) -> None:
    kept = {name: torch.full(tuple(p.shape), 0.02) for name, p in kit.model.named_parameters()}
    for i in range(4):
        kit.loss(i).backward()
        kit.optimizer.step()
        kit.optimizer.zero_grad()
        if i == 1:
            kit.model.load_state_dict(kept)


def written_inside_forward(kit: Kit) -> None:
    def halve(module: torch.nn.Module, args: object) -> None:
        with torch.no_grad():
            module[0].weight.mul_(0.9)

    kit.model.blocks[1].register_forward_pre_hook(halve)
    plain_steps(kit)


def group_added_later(kit: Kit) -> None:
    head = [kit.model.head.weight, kit.model.head.bias]
    for i in range(4):
        if i == 2:
            kit.optimizer.add_param_group({"params": list(itertools.islice(kit.model.parameters(), 2)), "lr": 0.03})
        kit.optimizer.zero_grad()
        kit.loss(i).backward()
        kit.optimizer.step()
    assert len(head) == 2


def _fail(*args: object) -> None:
    raise RuntimeError("a bad sample")


def _interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def _failing_gradient(error: type[BaseException]):  # type: ignore[no-untyped-def]
    def hook(module: torch.nn.Module, args: object, output: torch.Tensor) -> None:
        def fail(grad: torch.Tensor) -> None:
            raise error("in backward")

        output.register_hook(fail)

    return hook


def a_unit_inside_a_unit(kit: Kit) -> None:
    plain_steps(kit)


NEEDS_WHOLE_WEIGHTS = [written_between_steps, written_through_data, given_other_data, loaded_between_steps]
"""These read or write weights outside of a forward, which stage 3 refuses by name."""

ANY_STAGE = [
    plain_steps,
    clipped_by_torch,
    clipped_by_infinity_norm,
    clipped_by_value,
    clipped_twice,
    parts_clipped_apart,
    more_backward_after_clipping,
    more_backwards_than_announced,
    head_by_itself_then_the_rest,
    gradients_scaled_by_hand,
    gradients_of_the_head_dropped,
    gradients_stay_after_the_step,
    no_zero_grad,
    gradients_halved_instead_of_zeroed,
    stepped_twice,
    zeroed_in_place_where_a_part_is_unused,
    model_zeroed_in_place,
    scaled_by_torch,
    gradients_set_by_hand,
    accumulated_in_one_loop,
    model_zero_grad_skips_a_batch,
    optimizer_zero_grad_skips_a_batch,
    closures,
    failed_forward_is_skipped,
    failed_forward_inside_accumulation,
    interrupted_forward,
    interrupted_evaluation,
    failed_backward,
    interrupted_backward,
    written_inside_forward,
]
