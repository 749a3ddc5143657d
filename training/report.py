"""`python -m training.report`: the earlier name of `python -m reports`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("reports", run_name="__main__", alter_sys=True)
