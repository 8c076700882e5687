-- Commit groups of one shard: their trajectories are counted as trained, except those left out, and their payloads
-- deleted. Idempotent for each group, since only the call that deletes the log entry counts it. The last call closes the
-- batch in the shard; in the home shard, which is the last one, its record goes.
-- KEYS  void, trainer, groups, ledger, applied, owners, admission, results, batches, prompt_ends,
--       unlinked: output | payload | void ...
-- fenced by trainer
-- ARGV  epoch, batch id, k in the last call of all ('' in others), number of results that the last call in a shard removes
--       ('' in others), for each of them: entry id, bytes of its output columns; then of each group one text: entry id,
--       numbers of members that are trained on, baselines, and oversize, bytes, number of payloads, and
--       the group id of a prompt's group
-- Returns  number of groups committed
-- include count
-- include owners
-- include prompt_end
-- include announce
-- include close_batch
local UNLINKED = 1000  -- keys in one UNLINK
local results = tonumber(ARGV[4]) or 0
local gone, at, groups = {}, results, 0
local exclusions = cjson.decode(redis.call('HGET', keys.applied, ARGV[2]) or '{}')
for i = 5 + 2 * results, #ARGV do
  local entry, trained, baseline, oversize, bytes, payloads, prompt =
    string.match(ARGV[i], '^(%S+) (%d+) (%d+) (%d+) (%d+) (%d+) ?(%S*)$')
  payloads = tonumber(payloads)
  if redis.call('XDEL', keys.groups, entry) == 1 then
    groups = groups + 1
    note_prompt_end(prompt, 'trained')
    local left_out = math.min(tonumber(trained), #(exclusions[entry] or {}))
    count('trained', trained - left_out)
    count('dead:undecodable', left_out)
    count('dropped:baseline', baseline)
    count('dropped:oversize', oversize)
    count('live_bytes', -bytes)
    count(disown(keys.owners, entry), -trained - baseline - oversize)
    for payload = at + 1, at + payloads do gone[#gone + 1] = keys.unlinked[payload] end
  end
  at = at + payloads
end
for first = 1, #gone, UNLINKED do
  redis.call('UNLINK', unpack(gone, first, math.min(#gone, first + UNLINKED - 1)))
end
if groups > 0 then
  count('groups_logged', -groups)
  redis.pcall('HINCRBY', keys.trainer, 'held', -groups)
  announce()
end
write_counts()
if ARGV[4] ~= '' then close_batch(ARGV[2], 5, results) end
if ARGV[3] ~= '' and string.find(redis.call('HGET', keys.batches, ARGV[3]) or '', '"id":"' .. ARGV[2] .. '"', 1, true) then
  redis.call('HDEL', keys.batches, ARGV[3])
end
return groups
