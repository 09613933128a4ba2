"""What a run reports: metrics.jsonl, TensorBoard, wandb, the progress bar, the trace and the report page."""
