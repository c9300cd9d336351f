# SPDX-License-Identifier: Apache-2.0
"""A run leaves its report, whose failure never fails the run; old runs get one, too."""

from dataclasses import replace
from pathlib import Path

import pytest

import hetjax
from hetjax.errors import BadInput
from hetjax.models.presets import MODEL_CONFIGS
from hetjax.report.progress import Display
from hetjax.training.observers.run_reports import write_report
from hetjax.training.settings.presets import PRESETS
from tests.report.html_page import Page, assert_needs_nothing_else
from tests.training.small import MODEL_CONFIG, but, lines, small_preset


@pytest.mark.usefixtures("quick_compiling")
def test_a_run_leaves_a_report_where_it_stops_and_where_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(MODEL_CONFIGS, "small", MODEL_CONFIG)
    preset = but(small_preset(tmp_path), steps=4)
    monkeypatch.setitem(PRESETS, "small", preset)
    run_dir = preset.config.run_dir
    path = run_dir / "report.html"
    with hetjax.Trainer("small") as trainer:
        trainer.fit(2)
        html = path.read_text(encoding="utf-8")
        assert f"report: {path}" in capsys.readouterr().out
        stopped = trainer.report().values()
        assert (stopped["state"], stopped["step"]) == ("stopped by --stop-after 2", 2)
        assert any("stopped by --stop-after 2" in word for word in Page(html).words)
        trainer.fit()
    html = path.read_text(encoding="utf-8")
    assert_needs_nothing_else(html)
    report = hetjax.report_of(run_dir)
    metrics = lines(run_dir / "metrics.jsonl")
    assert report.record.metrics == metrics
    assert report.values()["loss"] == [x["loss"] for x in metrics if "loss" in x][-1]
    figures = Page(html).figures()
    assert figures["loss"] == f"{report.values()['loss']:.4f}"
    assert figures["validation loss"] == f"{metrics[-1]['val_loss']:.4f}"
    predicted = hetjax.simulate_plan(
        run_dir / "plan.json",
        cluster=run_dir / "cluster.toml",
        dtype="float32",
        quiet=True,
    )
    assert report.values()["predicted_step_time_s"] == pytest.approx(
        predicted.step_time_s, rel=0.5
    )
    how_sure = report.record.how_sure
    assert how_sure[0].startswith("how sure: 90% of such steps take ")
    assert {*how_sure} <= {*str(report).splitlines()} & {*Page(html).words}
    report.save(tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == html

    # a model with an unknown name, then a prediction that fails
    monkeypatch.delitem(MODEL_CONFIGS, "small")
    unknown = hetjax.report_of(run_dir)
    assert unknown.values() | {"predicted_step_time_s": None} == unknown.values()
    assert "small" in unknown.record.why_not_predicted

    def broken(*_: object):
        raise RuntimeError("something nobody thought of")

    path.unlink()
    write_report(run_dir, broken, Display(4))
    assert "no report was written: something nobody" in capsys.readouterr().out
    assert not path.exists()


def test_without_a_run_there_is_no_report(tmp_path: Path):
    with pytest.raises(BadInput, match="no run in '/"):
        hetjax.report_of(tmp_path)
    trainer = hetjax.Trainer(
        replace(PRESETS["tiny"].config, run_dir=tmp_path / "never")
    )
    with pytest.raises(BadInput, match="no run in '/"):
        trainer.report()
