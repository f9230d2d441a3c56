"""``python -m mathinterp``: the program ``mathinterp``, also where only this package is on the path."""

from mathinterp.cli.entry import main

if __name__ == "__main__":
    main()
