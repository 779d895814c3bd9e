"""DeepSpeed's names for dropped layers and tokens, and the legacy curriculum."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers import run_ranks
from models import Block, build, micro_batch
from runs import config

import xds.deepspeed as deepspeed
from xds import UsageError

LTD = {
    "enabled": True,
    "total_layer_num": 3,
    "random_ltd_layer_num": 1,
    "random_ltd_layer_id": [1],
    "model_mask_name": None,
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 4,
        "max_value": 8,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 4, "seq_per_step": 1},
    },
}
ROUTING = {"enabled": True, "data_routing": {"enabled": True, "random_ltd": LTD}}
LAYERS = {"enabled": True, "theta": 0.5, "gamma": 0.1}


def test_a_script_of_random_ltd_and_layer_drop_runs():
    from xds.deepspeed.runtime.data_pipeline.data_routing import helper

    def script() -> Any:
        settings = config(1, data_efficiency=ROUTING, progressive_layer_drop=LAYERS)
        engine, *_ = deepspeed.initialize(model=build("plain"), config=settings)
        engine = helper.convert_to_random_ltd(engine, Block)
        engine.random_ltd_initialize()
        scheduler, kept = engine.random_ltd_scheduler, []
        for step in range(3):
            engine.backward(engine(micro_batch(step, 0, 2)))
            engine.step()
            kept.append(scheduler.get_current_seq())
        names = list(helper.save_without_random_ltd(engine))
        found = (kept, scheduler.state["consumed_layer_tokens"], engine.get_pld_theta(), names)
        assert engine.pld_enabled() and engine.random_ltd_enabled() and engine.pld_theta() == 0.5
        assert engine.progressive_layer_drop.get_state()["pld_theta"] == found[2]
        engine.destroy()
        return found

    kept, tokens, theta, names = run_ranks(script, 2)[0]
    assert kept == [4, 5, 6]
    assert tokens == 4 * sum(count + 8 * 2 for count in kept)  # 4 samples of a step
    assert theta == (1.0 - 0.5) * np.exp(-0.1 * 3) + 0.5
    assert names == list(build("plain").state_dict())


def test_without_the_sections_the_answers_are_no():
    def script() -> Any:
        engine, *_ = deepspeed.initialize(model=build("plain"), config=config())
        assert not (engine.pld_enabled() or engine.random_ltd_enabled())
        assert not engine.curriculum_enabled_legacy() and engine.get_pld_theta() is None
        assert engine.progressive_layer_drop is None
        assert not hasattr(engine, "random_ltd_scheduler")
        with pytest.raises(UsageError, match=r"random_ltd\.enabled"):
            engine.random_ltd_initialize()
        from xds.deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd

        with pytest.raises(UsageError, match=r"random_ltd\.enabled"):
            convert_to_random_ltd(engine, Block)
        engine.destroy()

    run_ranks(script, 1)


def test_the_legacy_curriculum_is_read_and_set_as_in_deepspeed():
    class Cuts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return self.layer(x[:, : kwargs["curriculum_seqlen"]]).square().mean()

    def script() -> Any:
        section = {"enabled": True, "curriculum_type": "seqlen", "schedule_type": "custom"}
        section |= {"min_difficulty": 1, "max_difficulty": 9}
        engine, *_ = deepspeed.initialize(model=Cuts(), config=config(curriculum_learning=section))
        engine.curriculum_scheduler_legacy.set_custom_get_difficulty(lambda step: 3 * step)
        engine.backward(engine(torch.ones(2, 9, 2)))
        engine.step()
        scheduler = engine.curriculum_scheduler_legacy
        found = scheduler.get_current_difficulty(), scheduler.get_difficulty(5)
        assert engine.curriculum_enabled_legacy()
        engine.destroy()
        return found

    assert run_ranks(script, 1)[0] == (6, 15)


def test_names_of_deepspeeds_wrapper_are_taken_out_and_theta_is_deepspeeds():
    from xds.deepspeed.runtime.data_pipeline.data_routing.helper import remove_random_ltd_state_dict
    from xds.deepspeed.runtime.progressive_layer_drop import ProgressiveLayerDrop

    found = remove_random_ltd_state_dict({"h.1.random_ltd_layer.w": 1, "head": 2})
    assert found == {"h.1.w": 1, "head": 2}
    drop = ProgressiveLayerDrop(0.5, 0.001)
    assert drop.get_theta() == 1.0
    drop.update_state(1000)
    assert drop.get_state() == {
        "progressive_layer_drop": True,
        "pld_theta": 0.5 * np.exp(-1.0) + 0.5,
    }
