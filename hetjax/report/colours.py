# SPDX-License-Identifier: Apache-2.0
"""Defines the colours of pages and pictures: a palette per meaning, all disjoint.

A reader who has learnt that a colour is a replica must not meet it as a kind of work or
a share of memory. Replicas have Okabe and Ito's colours and kinds of work Tol's bright
ones, which colour-blind readers can tell apart. Parts of a whole are shades of one hue,
since their order tells them apart. Owns no drawing.
"""

REPLICAS = (
    "#56b4e9",
    "#e69f00",
    "#009e73",
    "#f0e442",
    "#cc79a7",
    "#0072b2",
    "#d55e00",
    "#999999",
)
WORK = {
    "forward": "#4477aa",
    "backward": "#ee6677",
    "input gradient": "#aa3377",
    "weight gradient": "#ccbb44",
    "update": "#6b6b6b",
    "transfer": "#66ccee",
    "reduction": "#228833",
}
MEMORY = {
    "static": "#41337a",
    "residuals": "#6e5ea8",
    "activations": "#9f93cc",
    "workspace": "#cfc8e8",
}
TIME = {
    "productive": "#1f5c4a",
    "lost": "#a8321e",
    "recovering": "#c8745a",
    "replanning": "#e0b39d",
    "data": "#3e5566",
    "compiling": "#647c8f",
    "evaluating": "#8ba3b5",
    "saving": "#b4c8d6",
    "other": "#d5d9dc",
}
CURVES = {"first": "#3b5bdb", "second": "#e8590c"}
