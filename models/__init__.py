"""The model zoo: one folder per registered model."""
