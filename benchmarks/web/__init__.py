"""What the web page costs."""
