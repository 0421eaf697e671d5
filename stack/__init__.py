"""The tool behind `dev`: builds, checks, exports and applies the patch stack. Standard library only, so that it runs before anything is installed."""
