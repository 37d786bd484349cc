"""The lines about a step have every number of it."""

from plans import RECIPE, tiny_config

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.mesh.layout import LayoutConfig
from jaxrl_planner.plan import describe_flow
from jaxrl_planner.planned_roles import roles_without_devices


def flow_of(config: Config) -> dict[str, str]:
    return dict(describe_flow(roles_without_devices(config)))


def test_the_flow_tells_every_number_of_a_step():
    flow = flow_of(load_config(Config, str(RECIPE), {"rollout.slots": "3600"}))
    assert flow["generation batch"].startswith("1,536 prompts x 16 samples = 24,576 responses")
    assert "512, with right and wrong answers = 8,192 sequences" in flow["groups kept"]
    assert flow["learning"] == (
        "16 updates x 512 sequences, each in at most 32 microbatches of 16 rows x 22,528 tokens"
    )
    assert flow["decoding"].startswith("3,600 slots over 16 replicas, 225 on each")


def test_a_pipeline_tells_how_long_it_is_idle():
    layout = LayoutConfig(train="2-2-2", generate="2-2-1-2", fsdp=2)
    flow = flow_of(tiny_config(mesh=layout))
    assert flow["pipeline, learning"] == (
        "2 stages x 2 microbatches of 2 rows: idle for 33% of the time"
    )
    assert flow["pipeline, prefill"].startswith("2 stages x 2 microbatches of 2 rows")
    assert flow["pipeline, decoding"].startswith("2 stages x 2 microbatches of 4 rows")
    assert "pipeline, learning" not in flow_of(tiny_config())
