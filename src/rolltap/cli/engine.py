"""`rolltap engine`: the embedded model server, or a scripted one."""

from __future__ import annotations

from pathlib import Path

from rolltap.errors import ConfigError
from rolltap.extras import install_line


def run(model: Path | None, script: Path | None, host: str, port: int, key: str) -> None:
    """Serves until interrupted."""
    if script is not None:
        from rolltap.engine.scripted import ScriptedEngine, load_script
        from rolltap.engine.tiny import FOLDER

        ScriptedEngine(load_script(script), model or FOLDER).run(host, port, key)
        return
    try:
        from rolltap.engine.server import main
    except ImportError as error:
        raise ConfigError(f"the embedded engine needs torch: {install_line('train')}") from error
    from rolltap.engine.settings import ModelServerSettings
    from rolltap.engine.tiny import FOLDER

    folder = model or FOLDER
    main(ModelServerSettings(folder, "tiny" if model is None else "", host, port, key=key))
