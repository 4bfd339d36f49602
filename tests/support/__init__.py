"""What tests share: real processes started and stopped, stand-ins for programs, a webhook receiver."""
