"""`python -m planner`: the same as the command `plan`."""

from planner.cli import main

if __name__ == "__main__":
    main()
