VERSION: str
TORCH: str
