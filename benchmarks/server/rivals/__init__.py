"""Parameter servers as one writes them with other tools. These files run without Shoal."""
