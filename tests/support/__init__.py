"""What the tests share; found through pythonpath in pyproject.toml, or the path that conftest.py adds."""
