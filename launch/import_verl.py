"""Writes a recipe from settings of verl: python launch/import_verl.py run_grpo.sh --out my_recipe.py."""

from jaxrl import cli

if __name__ == "__main__":
    cli.launch("import-verl")
