-- Make a stream anew after somebody has set its last id beyond any clock's: no command sets an id back. Its entries get
-- new ids, so a consumer that holds one finds it finished.
-- KEYS  void, stream: rollouts | scoring, ledger, malformed
-- ARGV  name of the place
-- Returns  1 when it was mended, else 0
-- include malformed
-- include last_id
if not is_at_end(keys.stream) then return 0 end
local entries, groups = redis.call('XRANGE', keys.stream, '-', '+'), redis.call('XINFO', 'GROUPS', keys.stream)
redis.call('DEL', keys.stream)
for _, entry in ipairs(entries) do redis.call('XADD', keys.stream, '*', unpack(entry[2])) end
for _, flat in ipairs(groups) do
  for i = 1, #flat, 2 do
    if flat[i] == 'name' then redis.call('XGROUP', 'CREATE', keys.stream, flat[i + 1], '0', 'MKSTREAM') end
  end
end
note_malformed(ARGV[1], 'last id', 'an id that no clock gives', '')
return 1
