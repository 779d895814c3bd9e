"""The engine and its optimizer as DeepSpeed shows them, and models in pipeline stages."""
