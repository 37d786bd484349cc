"""Shows what resharding between two layouts takes: python launch/mesh.py --train 1-4-2 --generate 1-2-2-2."""

from jaxrl import cli

if __name__ == "__main__":
    cli.launch("mesh")
