"""The same small job as other tools would run it, each by the recipe of its own documentation."""
