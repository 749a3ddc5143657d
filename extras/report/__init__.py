"""Many runs as one page: read (runs), grouped and compared (experiments), put into tables (content), drawn (charts), written."""
