"""Stands before this repository's `test` package for the unmodified driver only: everything else is found there."""
import pathlib
__path__.append(str(pathlib.Path(__file__).parents[3]))
