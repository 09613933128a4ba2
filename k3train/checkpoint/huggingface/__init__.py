"""Exchange with the released Hugging Face layout of Kimi K3; documented in docs/huggingface.md."""
