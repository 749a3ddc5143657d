"""`python -m training.sweep`: the earlier name of `python -m reports.sweep`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("reports.sweep", run_name="__main__", alter_sys=True)
