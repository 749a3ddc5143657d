"""Many runs as one page: read (runs), grouped (experiments), put into tables and charts, written (__main__, page.html.j2)."""
