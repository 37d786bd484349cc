"""Plans for a pod that is not here: launch/plan.py --config configs/dapo_qwen32b.py --topology v5p:4x4x8."""

from jaxrl import cli

if __name__ == "__main__":
    cli.launch("plan")
