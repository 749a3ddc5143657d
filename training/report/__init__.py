"""Many runs as one page: read (runs.py), grouped and compared (experiments.py), drawn (charts.py), written (page.py, table.py)."""
