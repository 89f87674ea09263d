"""python -m tools.check_attack."""

from tools.check_attack.command import run

if __name__ == "__main__":
    run()
