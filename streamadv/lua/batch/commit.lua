-- Commit groups of one shard: their trajectories are counted as trained, except those left out, and their payloads
-- deleted, or kept with their results. Idempotent for each group, since only the call that deletes the log entry counts it.
-- The last call closes the batch in the shard; in the home shard, which is the last one, its record goes.
-- KEYS  void, trainer, groups, ledger, applied, owners, admission, results, batches, kept,
--       prompt_ends, unlinked: output | payload | void ...
-- fenced by trainer
-- ARGV  fence, batch id, k in the last call of all ('' in others), number of results that the last call in a shard removes
--       ('' in others), record of the batch for groups that are kept, for each of the results: entry id, bytes of its
--       output columns; then of each group one text: entry id, numbers of members that are trained on, baselines, and
--       oversize, bytes, number of payloads, and whether to keep it: '-' = no, '0' = yes, '1' = yes, and behind its
--       payloads stands the output with its results, in the field 'kept:<group id>', '2' = likewise, and what the
--       trainer has made of its members, in 'late:<rollout index>:<group id>', '?' = the log does not have it: committed
--       before, lost, or dead; then the id of a prompt's group and its figures (see lib/prompt_end)
-- Returns  number of groups committed
-- include count
-- include owners
-- include announce
-- include close_batch
-- include keep
-- include prompt_end
local UNLINKED = 1000  -- keys in one UNLINK
local results = tonumber(ARGV[4]) or 0
local gone, at, groups = {}, results, 0
local applied = redis.call('HGET', keys.applied, ARGV[2])
local exclusions = cjson.decode(applied or '{}')
local late = {}  -- output -> group id -> fields
-- What the trainer has made of the members of a group: of each '<rollout index> <bytes>', a line end, and the bytes.
local function late_of(output, id)
  if not late[output] then
    late[output] = {}
    for _, field in ipairs(redis.pcall('HKEYS', output)) do
      local group_id = string.match(field, '^late:%d+:(.*)$')
      if group_id then
        late[output][group_id] = late[output][group_id] or {}
        table.insert(late[output][group_id], field)
      end
    end
  end
  local parts = {}
  for i, field in ipairs(late[output][id] or {}) do
    local value = redis.call('HGET', output, field)
    parts[i] = string.format('%s %d\n', string.match(field, '^late:(%d+)'), #value) .. value
  end
  return table.concat(parts)
end

-- Keep a group with its results, where there are any. Returns what `keep` does.
local function keep_trained(fields, left_out, output, has_late)
  local more, id = {'batch', string.match(ARGV[2], '^%d+'), 'record', ARGV[5]}, ''
  if left_out then more[5], more[6] = 'left_out', cjson.encode(left_out) end
  for i = 1, #fields, 2 do if fields[i] == 'group_id' then id = fields[i + 1] end end
  local computed = output and redis.pcall('HGET', output, 'kept:' .. id)
  if type(computed) == 'string' then more[#more + 1], more[#more + 2] = 'results', computed end
  if output and has_late then more[#more + 1], more[#more + 2] = 'late', late_of(output, id) end
  return keep('trained', 'trained', fields, more)
end

for i = 6 + 2 * results, #ARGV do
  local entry, trained, baseline, oversize, bytes, payloads, kept, prompt, figures =
    string.match(ARGV[i], '^(%S+) (%d+) (%d+) (%d+) (%d+) (%d+) ([-?012]) ?(%S*) ?(%S*)$')
  payloads = tonumber(payloads)
  local logged = string.match(kept, '%d') and keeps('trained') and redis.call('XRANGE', keys.groups, entry, entry)[1]
  if kept == '?' then
    -- Where the batch is closed, all its groups were noted.
    if applied and exclusions[entry] ~= 'dead' then note_prompt_end(prompt, 'trained', figures) end
  elseif redis.call('XDEL', keys.groups, entry) == 1 then
    groups = groups + 1
    note_prompt_end(prompt, 'trained', figures)
    local left_out = math.min(tonumber(trained), #(exclusions[entry] or {}))
    count('trained', trained - left_out)
    count('dead:undecodable', left_out)
    count('dropped:baseline', baseline)
    count('dropped:oversize', oversize)
    count('live_bytes', -bytes)
    count(disown(keys.owners, entry), -trained - baseline - oversize)
    local output = (kept == '1' or kept == '2') and keys.unlinked[at + payloads + 1]
    if not (logged and keep_trained(logged[2], exclusions[entry], output, kept == '2')) then
      for payload = at + 1, at + payloads do gone[#gone + 1] = keys.unlinked[payload] end
    end
  end
  at = at + payloads + ((kept == '1' or kept == '2') and 1 or 0)
end
for first = 1, #gone, UNLINKED do
  redis.call('UNLINK', unpack(gone, first, math.min(#gone, first + UNLINKED - 1)))
end
if groups > 0 then
  count('groups_logged', -groups)
  local held = redis.pcall('HINCRBY', keys.trainer, 'held', -groups)
  -- One that a server had lost may be back at the place it had: it was not counted.
  if type(held) == 'number' and held < 0 then redis.call('HSET', keys.trainer, 'held', '0') end
  announce()
end
write_counts()
if ARGV[4] ~= '' then close_batch(ARGV[2], 6, results) end
if ARGV[3] ~= '' and string.find(redis.call('HGET', keys.batches, ARGV[3]) or '', '"id":"' .. ARGV[2] .. '"', 1, true) then
  redis.call('HDEL', keys.batches, ARGV[3])
end
return groups
