"""A package that starts a thread when it is imported."""

import threading
import time

threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
