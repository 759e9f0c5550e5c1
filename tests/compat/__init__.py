"""What users of other libraries bring. `make test-compat` installs them and runs this directory."""
