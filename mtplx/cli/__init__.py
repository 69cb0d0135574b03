"""The command line: typer commands that build the objects and run them."""
