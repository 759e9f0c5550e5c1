"""Parameter servers written with other tools. These files run without Shoal."""
